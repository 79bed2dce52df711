"""assert_accurate rejects results with errors typical of kernels."""

import pytest
import torch

from marsrl.kernels.testing import assert_accurate, off_by_an_ulp

BF16, TILE = torch.bfloat16, 16


def two_rows_swapped(values):
    size = values.double().sum(dim=1)
    pair = torch.stack((size.argmin(), size.argmax()))
    values[pair] = values[pair.flip(0)]


SPOILERS = {
    "a block of zeros": lambda values: values[TILE : 2 * TILE, :TILE].zero_(),
    "the last tile dropped": lambda values: values[-TILE:].zero_(),
    "the last row dropped": lambda values: values[-1:].zero_(),
    "two rows swapped": two_rows_swapped,
    "scaled by a hundredth": lambda values: values.mul_(1.01),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("columns", [1, 64])
def test_a_spoiled_result_is_refused(columns, dtype, spoiler):
    a, b = torch.randn(100, 32).to(dtype), torch.randn(32, columns).to(dtype)
    exact, moved, found = a.double() @ b.double(), off_by_an_ulp(a) @ off_by_an_ulp(b), a @ b
    assert_accurate("product", found, exact, found, moved=moved, terms=32)
    SPOILERS[spoiler](wrong := found.clone())
    with pytest.raises(AssertionError, match="product"):
        assert_accurate("product", wrong, exact, found, moved=moved, terms=32)


def test_a_tiny_last_row_is_judged_with_the_rows_before_it():
    exact = torch.cat([torch.ones(32), torch.tensor([1e-9])]).double()
    assert_accurate("entropy", (exact + 3e-9).float(), exact, exact.float())
