"""Reference definition of sums over the tokens of packed sequences."""

import torch
from torch import Tensor

from marsrl.kernels.checks import sequence_of_tokens


def sequence_sums_reference(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of each sequence's values in the mask, and their number, [2, S] float64.

    values, mask: [T].
    """
    sequence_of = sequence_of_tokens(cu_seqlens, values.numel())
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    # Replace masked values rather than multiplying by 0, because they may be NaN.
    terms = torch.stack((torch.where(mask, values, 0.0).double(), mask.double()))
    return terms.new_zeros(2, cu_seqlens.numel() - 1).index_add_(1, sequence_of, terms)
