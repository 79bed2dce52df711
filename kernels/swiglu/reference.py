"""Reference definition of SwiGLU."""

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu_reference(products: Tensor, weights: Tensor | None) -> Tensor:
    """Compute silu(gate) * up * weight [R, F] of rows [R, 2 F].

    The arithmetic is float32 (float64 if an input is), rounded once.
    """
    is_wide = torch.float64 in (products.dtype, None if weights is None else weights.dtype)
    gate, up = products.to(torch.float64 if is_wide else torch.float32).chunk(2, dim=-1)
    out = silu(gate) * up
    if weights is not None:
        out = out * weights.to(out.dtype).unsqueeze(-1)
    return out.to(products.dtype)
