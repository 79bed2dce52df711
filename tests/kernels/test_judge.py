"""assert_accurate refuses a result that is spoiled in a way that kernels go wrong."""

import pytest
import torch

from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

BF16, TILE = torch.bfloat16, 16


def block_of_zeros(values):
    values[TILE : 2 * TILE, :TILE] = 0


def last_tile_dropped(values):
    values[-TILE:] = 0


def two_rows_swapped(values):
    size = values.double().sum(dim=1)
    pair = torch.stack((size.argmin(), size.argmax()))
    values[pair] = values[pair.flip(0)]


def scaled_by_a_hundredth(values):
    values.copy_(values * 1.01)


@pytest.mark.parametrize("spoil", [block_of_zeros, last_tile_dropped, two_rows_swapped, scaled_by_a_hundredth])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("columns", [1, 64])
def test_a_spoiled_result_is_refused(columns, dtype, spoil):
    a, b = torch.randn(100, 32).to(dtype), torch.randn(32, columns).to(dtype)
    exact, moved, found = a.double() @ b.double(), off_by_an_ulp(a) @ off_by_an_ulp(b), a @ b
    assert_accurate("product", found, exact, found, moved=moved, terms=32)
    spoil(wrong := found.clone())
    with pytest.raises(AssertionError, match="product"):
        assert_accurate("product", wrong, exact, found, moved=moved, terms=32)
