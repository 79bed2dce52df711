"""Value and gradients of swiglu against autograd in float64, for any implementation and device."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from marsrl.kernels import swiglu
from marsrl.kernels.testing import assert_accurate

Activation = Callable[[Tensor, Tensor | None], Tensor]


def eager(products: Tensor, weights: Tensor | None) -> Tensor:
    """What plain PyTorch makes of it, each step rounded to its dtype."""
    gate, up = products.chunk(2, dim=-1)
    out = silu(gate) * up
    return (out if weights is None else out * weights.unsqueeze(-1)).to(products.dtype)


def run(function: Activation, products: Tensor, weights: Tensor | None, upstream: Tensor) -> list[Tensor]:
    """Output, gradient of products, and that of weights where there are any."""
    inputs = [each.detach().clone().requires_grad_() for each in (products, weights) if each is not None]
    output = function(inputs[0], inputs[1] if weights is not None else None)
    output.backward(upstream.to(output.dtype))
    found = [output.detach(), *(each.grad for each in inputs)]
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]


def compare(
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    *,
    has_weights: bool = True,
    scale: float = 1.0,
    device: str = "cpu",
    function: Activation = swiglu,
) -> None:
    """shape: of the rows. scale: of the products; the gate of some rows is far out on either side."""
    products = (torch.randn(*shape, 2 * width, device=device) * scale).to(dtype)
    weights = torch.rand(*shape, device=device) if has_weights else None
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    exactly = (products.double(), None if weights is None else weights.double(), upstream.double())
    found, plain = (run(each, products, weights, upstream) for each in (function, eager))
    exact = run(eager, *exactly)
    names = ("output", "products.grad", "weights.grad")
    for name, value, truth, other in zip(names, found, exact, plain):
        # A row's weight is worth a sum whose terms cancel.
        size = (upstream.double() * eager(exactly[0], None)).abs().sum(-1).max().item() if name == names[2] else 0.0
        assert_accurate(name, value, truth, other, scale=size if shape and truth.numel() else 0.0)
    again = run(function, products, weights, upstream)
    assert all(torch.equal(one, other) for one, other in zip(found, again)), "two runs differ"
