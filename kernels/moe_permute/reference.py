"""Reference definition of moe_permute and moe_unpermute. Sums are float32 (float64 for float64 input), rounded once."""

import torch
from torch import Tensor


def moe_permute_reference(
    hidden: Tensor, weights: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor, weight_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (the token of each row [R, H], the weight of each row [R])."""
    rows = hidden.to(_wide(hidden)).index_select(0, token_of).to(hidden.dtype)
    return rows, weights.flatten().index_select(0, weight_of)


def moe_unpermute_reference(rows: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    """Return the sum of each token's rows, [T, H]."""
    sums = torch.zeros(bounds.numel() - 1, rows.shape[1], dtype=_wide(rows), device=rows.device)
    return sums.index_add(0, token_of, rows.to(sums.dtype)).to(rows.dtype)


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32
