"""Value and gradients of rms_norm against autograd in float64, for any implementation and device."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from marsrl.kernels import rms_norm
from marsrl.kernels.testing import assert_accurate

EPS = 1e-6


def eager(x: Tensor, weight: Tensor, *, eps: float, is_zero_centred: bool = False) -> Tensor:
    """PyTorch's."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight + is_zero_centred, eps)


def run(function: Callable[..., Tensor], x: Tensor, weight: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output and the gradients of x and weight."""
    of_x, of_weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    output = function(of_x, of_weight, eps=EPS)
    output.backward(upstream)
    assert of_x.grad is not None and of_weight.grad is not None
    return [output.detach(), of_x.grad, of_weight.grad]


def compare(
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    *,
    step: int = 1,
    is_zero_centred: bool = False,
    scale: float = 1.0,
    device: str = "cpu",
    function: Callable[..., Tensor] = rms_norm,
) -> None:
    """shape: of the rows, of which x has every step-th of a larger tensor's. scale: of x."""
    more = (*shape[:-1], step * shape[-1], width)
    x = (torch.randn(*more, device=device) * scale).to(dtype)[..., ::step, :]
    weight = torch.rand(width, device=device).to(dtype)
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    found, plain = (
        run(partial(each, is_zero_centred=is_zero_centred), x, weight, upstream) for each in (function, eager)
    )
    exact = run(partial(eager, is_zero_centred=is_zero_centred), x.double(), weight.double(), upstream.double())
    for name, value, truth, other in zip(("output", "x.grad", "weight.grad"), found, exact, plain):
        assert_accurate(name, value, truth, other)
    again = run(partial(function, is_zero_centred=is_zero_centred), x, weight, upstream)
    assert all(torch.equal(one, other) for one, other in zip(found, again)), "two runs differ"
