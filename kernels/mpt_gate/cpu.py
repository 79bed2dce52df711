"""The sums behind the entropy gate through csrc/cpu/segments.cpp."""

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


def sequence_sums_cpu(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[2, S] float64: of each sequence the entropy of its trained tokens added up, and how many these are."""
    wide = entropy if entropy.dtype == torch.float64 else entropy.float()
    wide, kept, boundaries = wide.contiguous(), mask.contiguous(), cu_seqlens.long().contiguous()
    sums = torch.empty(2, boundaries.numel() - 1, dtype=torch.float64, device="cpu")
    cpu_library().marsrl_sequence_sums(
        wide.data_ptr(),
        wide.dtype == torch.float64,
        kept.data_ptr(),
        boundaries.data_ptr(),
        sums.shape[1],
        sums.data_ptr(),
    )
    return sums
