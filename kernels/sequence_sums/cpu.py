"""Sums over the tokens of packed sequences through csrc/cpu/segments.cpp."""

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


def sequence_sums_cpu(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the sums and numbers of tokens, [2, S], that reference.py defines."""
    wide = values if values.dtype == torch.float64 else values.float()
    wide, boundaries = wide.contiguous(), cu_seqlens.contiguous()
    contiguous_mask = None if mask is None else mask.contiguous()
    sums = torch.empty(2, boundaries.numel() - 1, dtype=torch.float64, device="cpu")
    cpu_library().marsrl_sequence_sums(
        *(
            wide,
            wide.dtype == torch.float64,
            contiguous_mask,
            boundaries,
            boundaries.dtype == torch.int64,
            sums.shape[1],
            sums,
        )
    )
    return sums
