"""Value and gradients of rms_norm, also rotated, and of swiglu against autograd in float64, for any implementation and device."""

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


def eager_rotated_norm(x: Tensor, weight: Tensor, *, rotation: Tensor, eps: float = EPS) -> Tensor:
    """As transformers has it: x cos + rotate_half(x) sin, with cos and sin of every pair twice."""
    normed = eager_norm(x, weight, eps=eps)
    cos, sin = (
        torch.cat((each, each), -1).to(x.dtype).view(x.shape[0], *[1] * (x.dim() - 2), -1)
        for each in rotation.chunk(2, -1)
    )
    first, second = normed.chunk(2, -1)
    return normed * cos + torch.cat((-second, first), -1) * sin


def rotation_of(num_tokens: int, width: int, device: str = "cpu") -> Tensor:
    """[T, N] of positions up to some thousand."""
    angles = torch.rand(num_tokens, width // 2, device=device) * 4000
    return torch.cat((angles.cos(), angles.sin()), -1)


def compare_rotated_norm(
    shape: tuple[int, ...], width: int, dtype: torch.dtype, *, step: int = 1, device: str = "cpu"
) -> None:
    """As compare_norm, of heads that are rotated by position."""
    x = torch.randn(*shape[:-1], step * shape[-1], width, device=device).to(dtype)[..., ::step, :]
    weight, rotation = torch.rand(width, device=device).to(dtype), rotation_of(shape[0], width, device)
    upstream = torch.randn(*shape, width, device=device).to(dtype)
    ours = partial(rms_norm, eps=EPS, rotation=rotation)
    judge(NAMES, ours, partial(eager_rotated_norm, rotation=rotation), [x, weight], [upstream])


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
