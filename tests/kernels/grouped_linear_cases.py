"""Value and gradients of grouped_linear against autograd in float64, for any implementation and device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from marsrl.kernels import grouped_linear
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp


def run(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: Tensor, upstream: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, gradients of x and weights) of function(x, weights) at this dtype."""
    x, weights = x.detach().to(dtype).requires_grad_(), weights.detach().to(dtype).requires_grad_()
    output = function(x, weights)
    (output * upstream.to(output.dtype)).sum().backward()
    assert x.grad is not None and weights.grad is not None
    return output.detach(), x.grad, weights.grad


def compare(
    counts: Sequence[int],
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    *,
    given: Tensor | Sequence[int],
    device: str = "cpu",
    function: Callable[[Tensor, Tensor, Tensor | Sequence[int]], Tensor] = grouped_linear,
) -> None:
    """given: the counts as the function gets them."""
    x = torch.randn(sum(counts), num_in, device=device).to(dtype)
    weights = torch.randn(len(counts), num_out, num_in, device=device).to(dtype)
    upstream = torch.randn(sum(counts), num_out, dtype=torch.float64, device=device)
    found = run(lambda x, w: function(x, w, given), x, weights, upstream, dtype)
    known = torch.tensor(counts)
    exact, plain = (
        run(lambda x, w: grouped_linear_reference(x, w, known), x, weights, upstream, d) for d in (torch.float64, dtype)
    )
    near = off_by_an_ulp(x), off_by_an_ulp(weights)
    moved = run(lambda x, w: grouped_linear_reference(x, w, known), *near, upstream, torch.float64)
    names, terms = ("output", "x.grad", "weights.grad"), (num_in, num_out, max(counts))
    for name, longest, *values, off in zip(names, terms, found, exact, plain, moved):
        assert_accurate(name, *values, moved=off, terms=longest)
    again = run(lambda x, w: function(x, w, given), x, weights, upstream, dtype)
    for name, one, other in zip(("output", "x.grad", "weights.grad"), found, again):
        assert torch.equal(one, other), f"{name} differs between two runs"


def check_without_rows() -> None:
    for num_experts in (2, 0):
        x, weights = torch.randn(0, 8, requires_grad=True), torch.randn(num_experts, 4, 8, requires_grad=True)
        grouped_linear(x, weights, [0] * num_experts).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, 8) and weights.grad is not None and not weights.grad.any()
