"""RMSNorm in plain PyTorch: the definition."""

import torch
from torch import Tensor


def rms_norm_reference(rows: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """[R, N] = x / sqrt(mean(x^2) + eps) * (weight + offset) of rows [R, N], in float32 (float64 where an input is), rounded
    once."""
    is_wide = torch.float64 in (rows.dtype, weight.dtype)
    x = rows.to(torch.float64 if is_wide else torch.float32)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * (weight.to(x.dtype) + offset)).to(rows.dtype)
