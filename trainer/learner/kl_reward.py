"""KL penalty as part of each token's advantage, for loss.kl_in=reward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KlToGo:
    """Sum of the log-ratio to the reference over each token of a packed batch and the later tokens of the same sample.

    With minus this sum as advantage, the policy gradient on samples of the current policy is minus the gradient of the whole
    sample's KL(policy || reference). Terms of earlier tokens are left out, because they do not depend on the token. The mean over
    the agent's other samples is subtracted as a baseline. This leaves the expected gradient unchanged; without a baseline,
    almost all advantages would be negative.

    All tensors are on the CPU.
    values: [T] float64, the sums, nats.
    sample_of: [T] int64, index of each token's sample.
    sums: [S, 2] float64, for each sample the sum of `values` over trained tokens, and the number of these tokens.
    agent_of: [S] int64, index of each sample's agent.
    """

    values: Tensor
    sample_of: Tensor
    sums: Tensor
    agent_of: Tensor

    @classmethod
    def of(cls, log_ratio: Tensor, mask: Tensor, cu_seqlens: Tensor, agent_of: Tensor) -> KlToGo:
        """Build from log_ratio, [T] log p_rollout - log p_reference, 0 outside the mask [T] of trained tokens."""
        bounds = cu_seqlens.long()
        before = torch.nn.functional.pad(log_ratio.double().cumsum(0), (1, 0))  # [T+1]
        sample_of = torch.arange(len(agent_of)).repeat_interleave(bounds.diff())
        values = before[bounds[1:]][sample_of] - before[:-1]
        trained = torch.stack([values, torch.ones_like(values)], 1) * mask[:, None]
        sums = values.new_zeros(len(agent_of), 2).index_add(0, sample_of, trained)
        return cls(values, sample_of, sums, agent_of)

    def totals(self, num_agents: int) -> Tensor:
        """Return, over each agent's samples, the sum of values and the number of trained tokens, [A, 2] float64."""
        return self.sums.new_zeros(num_agents, 2).index_add(0, self.agent_of, self.sums)

    def centred(self, totals: Tensor) -> Tensor:
        """Return values minus their mean over trained tokens of the agent's other samples, [T] float32.

        The mean is 0 if the agent has no other sample.

        totals: [A, 2], sum over all batches of what the method `totals` returns.
        """
        total, number = (totals[self.agent_of] - self.sums).unbind(1)
        baseline = torch.where(number > 0.5, total / number.clamp(min=1), 0.0)
        return (self.values - baseline[self.sample_of]).float()
