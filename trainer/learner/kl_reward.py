"""loss.kl_in=reward: the KL penalty as part of each token's advantage."""

import torch
from torch import Tensor


def kl_to_go(log_ratio: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] float32: of each token the sum of log_ratio [T] over it and the later tokens of its sequence.

    log_ratio: log p_rollout - log p_reference, nats, 0 outside the mask. cu_seqlens: [S+1], bounds of the sequences.

    With advantages of minus this sum, the policy gradient of samples of the current policy is minus the gradient of the whole
    sequence's KL(policy || reference): a token's earlier terms do not depend on it. No baseline is subtracted, and the sum is not
    divided by a group's standard deviation.
    """
    total = torch.nn.functional.pad(log_ratio.double().cumsum(0), (1, 0))  # [T+1] of the tokens before
    bounds = cu_seqlens.long()
    ends = total[bounds[1:]].repeat_interleave(bounds.diff())
    return (ends - total[:-1]).float()
