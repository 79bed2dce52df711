"""grouped_linear's Triton kernels, with tiles so small that a few rows need several."""

import pytest
import torch
from grouped_linear_cases import check_without_rows, compare

from marsrl.kernels import grouped_linear
from marsrl.kernels.grouped_linear import triton_impl
from marsrl.kernels.grouped_linear.triton_impl import Tiles


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(triton_impl, "plan_tiles", lambda dtype: Tiles(4, 8, 8, 4, 1))


# ends inside of a tile and at its end, experts without rows; K and N that no tile divides, and that one does
@pytest.mark.parametrize("counts", [[5, 0, 3, 12, 0], [0, 0, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_expert_sees_its_own_rows(counts, dtype):
    compare(counts, 10, 16, dtype, given=counts)


def test_counts_in_a_tensor():
    counts = [0, 6, 1, 0, 2]
    compare(counts, 8, 5, torch.float32, given=torch.tensor(counts))


def test_rows_and_weights_are_read_in_place():
    x, weights = torch.randn(8, 6).t().requires_grad_(), torch.randn(2, 8, 4).transpose(1, 2)
    output = grouped_linear(x, weights, [2, 4])
    torch.testing.assert_close(output, torch.cat([x[:2] @ weights[0].t(), x[2:] @ weights[1].t()]))
    output.sum().backward()  # an expanded gradient
    torch.testing.assert_close(x.grad[:2], weights[0].sum(0).expand(2, 8))


def test_no_rows_and_no_expert():
    check_without_rows()
