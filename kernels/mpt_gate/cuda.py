"""Sums over the tokens of packed sequences through csrc/cuda/segments.cu."""

import torch
from torch import Tensor

from marsrl.kernels.cuda_library import queue
from marsrl.kernels.library import address


def sequence_sums_cuda(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """[2, S] float64: of each sequence the sum of values [T] over the tokens of mask [T], and how many these are."""
    wide = values if values.dtype == torch.float64 else values.float()
    wide, boundaries = wide.contiguous(), cu_seqlens.long().contiguous()
    kept = None if mask is None else mask.contiguous()
    sums = torch.empty(2, boundaries.numel() - 1, dtype=torch.float64, device=values.device)
    queue(
        "sequence_sums",
        values,
        wide.data_ptr(),
        wide.dtype == torch.float64,
        address(kept),
        boundaries.data_ptr(),
        sums.shape[1],
        sums.data_ptr(),
    )
    return sums
