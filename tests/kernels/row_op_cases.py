"""Value and gradients of rms_norm and swiglu against autograd in float64, for any implementation and device."""

from functools import partial

import torch
from judging import judge
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu

from marsrl.kernels import rms_norm, swiglu

EPS = 1e-6
NAMES = ("output", "first gradient", "second gradient")


def eager_norm(x: Tensor, weight: Tensor, *, eps: float = EPS, is_zero_centred: bool = False) -> Tensor:
    return torch_rms_norm(x, weight.shape, weight + is_zero_centred, eps)


def eager_swiglu(products: Tensor, weights: Tensor | None = None) -> Tensor:
    """Plain PyTorch, each step rounded to its dtype."""
    gate, up = products.chunk(2, dim=-1)
    out = silu(gate) * up
    return (out if weights is None else out * weights.unsqueeze(-1)).to(products.dtype)


def compare_norm(
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    *,
    step: int = 1,
    is_zero_centred: bool = False,
    scale: float = 1.0,
    device: str = "cpu",
) -> None:
    """shape: of the rows, of which x has every step-th of a larger tensor's. scale: of x."""
    more = (*shape[:-1], step * shape[-1], width)
    x = (torch.randn(*more, device=device) * scale).to(dtype)[..., ::step, :]
    weight = torch.rand(width, device=device).to(dtype)
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    words = {"eps": EPS, "is_zero_centred": is_zero_centred}
    judge(NAMES, partial(rms_norm, **words), partial(eager_norm, **words), [x, weight], [upstream])


def compare_swiglu(
    shape: tuple[int, ...],
    width: int,
    dtype: torch.dtype,
    *,
    has_weights: bool = True,
    scale: float = 1.0,
    device: str = "cpu",
) -> None:
    """shape: of the rows. scale: of the products; the gate of some rows is far out on either side."""
    products = (torch.randn(*shape, 2 * width, device=device) * scale).to(dtype)
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    inputs = [products, torch.rand(*shape, device=device)] if has_weights else [products]
    # A row's weight is worth a sum whose terms cancel.
    size = (upstream.double() * eager_swiglu(products.double())).abs().sum(-1).max().item()
    names, scales = NAMES[: 1 + len(inputs)], (0.0, 0.0, size)[: 1 + len(inputs)]
    judge(names, swiglu, eager_swiglu, inputs, [upstream], scales=scales)
