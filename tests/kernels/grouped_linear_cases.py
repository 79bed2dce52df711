"""Value and gradients of grouped_linear against autograd in float64, for any implementation and device."""

from collections.abc import Callable, Sequence

import torch
from judging import judge
from torch import Tensor

from marsrl.kernels import grouped_linear
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.grouped_linear.reference import grouped_linear_reference
from marsrl.kernels.grouped_linear.torch_impl import TorchGroupedLinear
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.testing import assert_accurate, off_by_an_ulp


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


def compare_main_grad(
    counts: Sequence[int],
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    function: Callable[..., Tensor] = grouped_linear,
) -> None:
    """Two backwards into one main_grad, of weights [E, 2, num_out / 2, num_in]: dW, dX, and what Megatron's hooks see."""
    x, upstream = (torch.randn(sum(counts), size, device=device).to(dtype) for size in (num_in, num_out))
    weights = torch.randn(len(counts), 2, num_out // 2, num_in, device=device).to(dtype).requires_grad_()
    weights.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    placeholders: list[Tensor] = []
    weights.register_hook(placeholders.append)
    held = torch.randn(weights.shape, device=device)
    main_grad, given = held.clone(), torch.tensor(counts)
    for _ in range(2):
        leaf, kept = x.clone().requires_grad_(), main_grad.clone()
        out = function(leaf, weights, given, main_grad=main_grad)
        assert torch.equal(main_grad, kept)  # by the forward
        out.backward(upstream)
        assert leaf.grad is not None and weights.grad_added_to_main_grad is True  # type: ignore[attr-defined]
    assert [(each.shape, each.dtype) for each in placeholders] == [(weights.shape, dtype)] * 2

    def gradients(change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        leaves = [change(each.detach()).requires_grad_() for each in (x, weights.flatten(1, 2))]
        of_x, of_weights = torch.autograd.grad(grouped_linear_reference(*leaves, given), leaves, change(upstream))
        return of_x, held + 2 * of_weights.view_as(held)

    results = (leaf.grad, main_grad), *map(gradients, (Tensor.double, torch.clone, off_by_an_ulp))
    for name, terms, *values in zip(("x.grad", "main_grad"), (num_out, max(counts)), *results, strict=True):
        found, exact, plain, moved = values
        assert_accurate(name, found, exact, plain, moved=moved, terms=terms)
    of_nobody = torch.tensor([count == 0 for count in counts], device=device)
    assert torch.equal(main_grad[of_nobody], held[of_nobody])


def by_grouped_mm(x: Tensor, weights: Tensor, counts: Tensor, *, main_grad: Tensor | None = None) -> Tensor:
    """grouped_linear as "torch" serves it, on any device."""
    buffer = None if main_grad is None else MainGrad(weights, main_grad.flatten(1, -2))
    given = TorchGroupedLinear(), x, weights.flatten(1, -2), torch.as_tensor(counts), buffer
    out: Tensor = Gradient("grouped_linear", num_tensors=3).node.apply(*given)
    return out


def check_without_rows() -> None:
    for num_experts in (2, 0):
        x, weights = torch.randn(0, 8, requires_grad=True), torch.randn(num_experts, 4, 8, requires_grad=True)
        grouped_linear(x, weights, [0] * num_experts).sum().backward()
        assert x.grad is not None and x.grad.shape == (0, 8) and weights.grad is not None and not weights.grad.any()
