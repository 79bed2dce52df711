"""What the softmax of a token's logits comes to: the numbers that its loss and its gradient are made of."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Statistics:
    """Per token [T] float32: log-prob of the target, entropy (nats), largest raw logit, log of the sum of exp.

    With d = (z - maximum) / tau:  log_sum = log sum e^d,  log p_y = d_y - log_sum,  H = log_sum - sum d e^d / sum e^d.
    """

    logprobs: Tensor
    entropy: Tensor
    maximum: Tensor
    log_sum: Tensor

    @staticmethod
    def zeros(num_tokens: int, device: torch.device) -> "Statistics":
        return Statistics(*torch.zeros(4, num_tokens, dtype=torch.float32, device=device).unbind())
