"""The entropy gate of DMMPT in plain PyTorch."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def mpt_gate_reference(
    entropy: Tensor, mask: Tensor, sequence_of: Tensor, positive: Tensor, threshold: float, scope: str, group: Any
) -> Tensor:
    """[S] bool: positive, and mean entropy over the tokens of the sample (or of the whole batch) below threshold."""
    # Masked entropies are replaced, not multiplied by 0: they may be NaN.
    values, count = torch.where(mask, entropy, 0.0).double(), mask.double()
    if scope == "sample":
        zeros = values.new_zeros(positive.numel())
        sums = torch.stack((zeros.index_add(0, sequence_of, values), zeros.index_add(0, sequence_of, count)))
    else:
        sums = torch.stack((values.sum(), count.sum()))
    if group is not None:
        dist.all_reduce(sums, group=group)
    return positive & (sums[0] < threshold * sums[1])  # no token: no gate, and no division by 0
