"""Value and gradients of grouped_linear against autograd in float64, for any implementation and device."""

from collections.abc import Callable, Sequence

import torch
from judging import judge
from torch import Tensor

from marsrl.kernels import grouped_linear
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference


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
    judge(
        ("output", "x.grad", "weights.grad"),
        lambda x, w: function(x, w, given),
        lambda x, w: grouped_linear_reference(x, w, torch.tensor(counts)),
        (x, weights),
        [upstream],
        terms=(num_in, num_out, max(counts)),
    )


def check_without_rows() -> None:
    for num_experts in (2, 0):
        x, weights = torch.randn(0, 8, requires_grad=True), torch.randn(num_experts, 4, 8, requires_grad=True)
        grouped_linear(x, weights, [0] * num_experts).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, 8) and weights.grad is not None and not weights.grad.any()
