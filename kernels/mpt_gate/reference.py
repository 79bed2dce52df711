"""The sums behind the entropy gate of DMMPT in plain PyTorch: the definition."""

import torch
from torch import Tensor

from marsrl.kernels.checks import sequence_of_tokens


def sequence_sums_reference(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[2, S] float64: of each sequence the entropy of its trained tokens added up, and how many these are."""
    sequence_of = sequence_of_tokens(cu_seqlens, entropy.numel())
    # Masked entropies are replaced, not multiplied by 0: they may be NaN.
    terms = torch.stack((torch.where(mask, entropy, 0.0).double(), mask.double()))
    return terms.new_zeros(2, cu_seqlens.numel() - 1).index_add_(1, sequence_of, terms)
