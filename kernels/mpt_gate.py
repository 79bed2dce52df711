"""Gate that selects the samples whose well-mastered tokens are masked in the loss."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels.checks import FLOATS, check, check_cu_seqlens
from marsrl.kernels.sequence_sums import sequence_sums


def mpt_gate(
    entropy: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    positive: Tensor,
    *,
    entropy_threshold: float = 0.2,
    scope: str = "sample",
    process_group: Any = None,
) -> Tensor:
    """Compute gate[s] = positive[s] and H < entropy_threshold (DMMPT, arXiv:2507.19766).

    H is a mean entropy; see `scope`. In a sample whose gate is set, the loss masks each token with a probability of at least
    mpt_probability.

    Args:
        entropy: [T] float, entropy of each token in nats; not read where mask is False.
        mask: [T] bool, the trained tokens.
        cu_seqlens: [S+1] int.
        positive: [S] bool, True if the sample's task reward, before penalties, is at least 1.
        scope: "sample": H is the mean entropy of the sample's trained tokens; "batch": of all trained tokens.
        process_group: ranks over which H is averaged; None: this rank only. For "sample", the context-parallel ranks of a sample,
            which all pass the same S; for "batch", the ranks that share the batch.

    Returns:
        [S] bool; False for a sample without tokens or, with "batch", if there are no tokens at all.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    if scope not in ("sample", "batch"):
        raise ValueError(f"mpt_gate: scope is {scope!r}, expected sample or batch")
    check("mpt_gate", "entropy", entropy, (None,), FLOATS)
    num_tokens = entropy.shape[0]
    check("mpt_gate", "mask", mask, (num_tokens,), (torch.bool,), entropy.device)
    num_sequences = check_cu_seqlens("mpt_gate", cu_seqlens, num_tokens, entropy.device)
    check("mpt_gate", "positive", positive, (num_sequences,), (torch.bool,), entropy.device)
    sums = sequence_sums(entropy.detach(), mask, cu_seqlens)  # [2, S]: entropy, tokens
    if scope == "batch":
        sums = sums.sum(dim=1, keepdim=True)
    if process_group is not None:
        dist.all_reduce(sums, group=process_group)
    total, count = sums.unbind()
    # Multiply by the count instead of dividing: a sample without tokens then gets False, not NaN.
    return positive & (total < entropy_threshold * count)
