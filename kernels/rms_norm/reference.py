"""Reference definition of RMSNorm and of the rotation after it."""

import torch
from torch import Tensor


def rms_norm_reference(rows: Tensor, weight: Tensor, rotation: Tensor | None, eps: float, offset: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * (weight + offset) of rows [R, N].

    If a rotation is given, the result is then rotated.

    The arithmetic is float32 (float64 if an input is), rounded once.
    """
    is_wide = torch.float64 in (rows.dtype, weight.dtype)
    x = rows.to(torch.float64 if is_wide else torch.float32)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    out = x * scale * (weight.to(x.dtype) + offset)
    return (out if rotation is None else rotated(out, rotation)).to(rows.dtype)


def rotated(rows: Tensor, rotation: Tensor, *, is_back: bool = False) -> Tensor:
    """Rotate columns i and N/2 + i of rows [R, N] by angle i of the row's token, as in rms_norm.

    is_back: rotate by minus that angle.
    """
    of_token = rows.view(rotation.shape[0], rows.shape[0] // max(1, rotation.shape[0]), rows.shape[1])
    cos, sin = rotation.unsqueeze(1).to(rows.dtype).chunk(2, dim=-1)
    sin = -sin if is_back else sin
    first, second = of_token.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).view(rows.shape)
