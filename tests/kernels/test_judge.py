"""assert_accurate refuses a result that is spoiled in a way that kernels go wrong."""

import pytest
import torch
from fused_head import arguments_for, run_policy_loss, without_target

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


def test_a_nan_and_another_shape_are_refused():
    exact = torch.ones(4, dtype=torch.float64)
    for wrong in (torch.tensor([1.0, 1.0, torch.nan, 1.0]), torch.ones(5)):
        with pytest.raises(AssertionError, match="result"):
            assert_accurate("result", wrong, exact, torch.ones(4))


def test_a_weight_gradient_of_nothing_but_its_targets_is_refused():
    """The error of the columns that are nobody's target drowns in that of the targets, and is seen beside its like."""
    case = torch.randn(128, 32), torch.randn(4000, 32) * 0.1, torch.randint(0, 3984, (128,))
    arguments = arguments_for(case, "clip")
    exact, plain = (run_policy_loss(case, arguments, dtype)[2] for dtype in (torch.float64, BF16))
    apart = without_target(case[2][arguments["mask"]], 4000)
    zeroed = plain.masked_fill(apart[:, None], 0)
    error, baseline = ((values.double() - exact).abs().max() for values in (zeroed, plain))
    assert error <= max(2 * baseline, 4 * torch.finfo(BF16).eps * exact.abs().max())
    with pytest.raises(AssertionError, match=r"weight.grad: \d+ of \d+ blocks apart are off"):
        assert_accurate("weight.grad", zeroed, exact, plain, apart=apart)
