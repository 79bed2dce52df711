"""grouped_linear: a loop of GEMMs against autograd in float64."""

import pytest
import torch

from marsrl.kernels import grouped_linear
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.testing import assert_accurate


def run(function, x, weights, upstream, dtype):
    x, weights = x.detach().to(dtype).requires_grad_(), weights.detach().to(dtype).requires_grad_()
    output = function(x, weights)
    (output * upstream.to(output.dtype)).sum().backward()
    return output.detach(), x.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 1, 7], [0, 5, 0], [0, 0, 0], [4, 4, 4]])
@pytest.mark.parametrize("as_tensor", [True, False])
def test_each_expert_sees_its_own_rows(counts, dtype, as_tensor):
    x, weights = torch.randn(sum(counts), 6).to(dtype), torch.randn(3, 5, 6).to(dtype)
    upstream = torch.randn(sum(counts), 5, dtype=torch.float64)
    given = torch.tensor(counts) if as_tensor else counts
    found = run(lambda x, w: grouped_linear(x, w, given), x, weights, upstream, dtype)
    exact, plain = (
        run(lambda x, w: grouped_linear_reference(x, w, counts), x, weights, upstream, d)
        for d in (torch.float64, dtype)
    )
    for name, *values in zip(("output", "x.grad", "weights.grad"), found, exact, plain):
        assert_accurate(name, *values)


def test_frozen_weights_and_strided_rows():
    x = torch.randn(8, 6).t().requires_grad_()
    output = grouped_linear(x, torch.randn(2, 4, 8), [2, 4])
    output.sum().backward()
    assert x.grad.shape == (6, 8)


@pytest.mark.parametrize(
    "counts, message",
    [
        ([2, 3], r"tokens_per_expert is \[2, 3\], expected 2 counts that add up to 6 rows"),
        ([6], "expected 2 counts"),
        ([7, -1], "expected 2 counts"),
        (torch.tensor([3.0, 3.0]), "tokens_per_expert has dtype float32, expected int64 or int32"),
    ],
)
def test_wrong_counts_are_named_with_what_was_expected(counts, message):
    with pytest.raises(ValueError, match="grouped_linear: .*" + message):
        grouped_linear(torch.randn(6, 8), torch.randn(2, 4, 8), counts)
