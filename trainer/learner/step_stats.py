"""Statistics of an optimizer step, from sums over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels.head.objective import METRICS
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.learner.trained_tokens import TrainedTokens

if TYPE_CHECKING:  # megatron is imported when a Learner is made: after the CPU shim is in force
    from marsrl.trainer.learner.megatron.head import HeadResult
    from marsrl.trainer.learner.megatron.router_replay import ReplayCounts

_OUR_SUMS = ("nll", "weighted_nll")
_NUM_FIRST = 5  # loss, gated samples, compared tokens, sum of |dp|, sum of k3; then the metrics of every agent


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, summed over all ranks and micro-batches; the same on every rank.

    loss: the minimised number (already divided by the normaliser). grad_norm: before clipping.
    is_updated: the weights changed. is_skipped: loss or gradient was not finite on some rank, nobody updated.
    is_empty: no trained token on any rank; nothing was computed.
    agent_sums: {metric: one number an agent}: loss, clipped_tokens, masked_tokens (DMMPT, correction), clamped_tokens,
        entropy and kl (sums in nats), tokens, nll (-sum log p), weighted_nll (the same times token weights; supervised training).
    prob_diff_mean, prob_diff_max: |p_trainer - p_rollout| over trained tokens; k3: mean of r - 1 - log r with
        r = p_trainer / p_rollout (an estimate of KL(rollout || trainer), nats). NaN where rollout log-probs are unknown.
    logprobs: [T] float32 CPU per micro-batch of this rank, nats, 0 outside the mask; empty before the last stage.
    num_updates: optimizer updates that changed the weights.
    replay: how the forced experts compare with the router's own choice; None where none were forced.
    agent_grad_norms: of each agent's share of the gradient, before clipping; None for an agent without a trained token; ()
        where they were not measured.
    tokens: of the samples that were asked for, those whose tokens this rank speaks for: of all ranks together, each once.
    """

    loss: float
    grad_norm: float
    lr: float
    is_updated: bool
    is_skipped: bool
    is_empty: bool
    agent_sums: dict[str, tuple[float, ...]]
    gated_samples: int
    prob_diff_mean: float
    prob_diff_max: float
    k3: float
    logprobs: tuple[Tensor, ...]
    num_updates: int = 0
    replay: ReplayCounts | None = None
    agent_grad_norms: tuple[float | None, ...] = ()
    tokens: tuple[TrainedTokens, ...] = ()


class StepSums:
    """Sums over this rank's micro-batches, on the device: nothing waits for it until they are reduced."""

    def __init__(self, num_agents: int, device: torch.device) -> None:
        self._num_agents = num_agents
        self._total = torch.zeros(_size(num_agents), dtype=torch.float64, device=device)
        self._largest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, batch: PackedBatch, result: HeadResult, *, counts_samples: bool) -> None:
        """One micro-batch. counts_samples: False on all but one of the ranks that a sample is cut over."""
        head, biggest = _mismatch(batch, result, counts_samples=counts_samples)
        agents = [result.policy.agent_sums[name].double() for name in METRICS]
        self._total += torch.cat([head, *agents, *self._nll(batch, result.policy.logprobs)])
        self._largest = torch.maximum(self._largest, biggest)

    def reduced(self) -> ReducedSums:
        """Over all ranks, on the host. Collective; a rank that has added nothing brings zeros."""
        dist.all_reduce(self._total)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        return ReducedSums(self._num_agents, tuple(self._total.tolist()), float(self._largest))

    def _nll(self, batch: PackedBatch, logprobs: Tensor) -> list[Tensor]:
        agent_of = torch.repeat_interleave(batch.agent_of, batch.cu_seqlens.diff().long(), output_size=batch.num_tokens)
        weights = batch.token_advantages
        weighted = -logprobs if weights is None else -logprobs * weights
        empty = torch.zeros(self._num_agents, dtype=torch.float64, device=logprobs.device)
        return [empty.index_add(0, agent_of, values.double()) for values in (-logprobs, weighted)]


@dataclass(frozen=True)
class ReducedSums:
    """StepSums of all ranks. values: the loss first. largest: |p_trainer - p_rollout| of a token."""

    num_agents: int
    values: tuple[float, ...]
    largest: float

    @property
    def loss(self) -> float:
        return self.values[0]

    def stats(
        self,
        grad_norm: float,
        lr: float,
        logprobs: Sequence[Tensor],
        *,
        is_skipped: bool = False,
        is_empty: bool = False,
        replay: ReplayCounts | None = None,
        agent_grad_norms: tuple[float | None, ...] = (),
        tokens: tuple[TrainedTokens, ...] = (),
    ) -> StepStats:
        loss, gated, compared, difference, k3 = self.values[:_NUM_FIRST]
        rest, width = self.values[_NUM_FIRST:], self.num_agents
        is_updated = not (is_skipped or is_empty)
        return StepStats(
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            is_updated=is_updated,
            is_skipped=is_skipped,
            is_empty=is_empty,
            agent_sums={name: rest[i * width : (i + 1) * width] for i, name in enumerate(METRICS + _OUR_SUMS)},
            gated_samples=round(gated) if math.isfinite(gated) else 0,
            prob_diff_mean=difference / compared if compared else math.nan,
            prob_diff_max=self.largest if compared else math.nan,
            k3=k3 / compared if compared else math.nan,
            logprobs=tuple(logprobs),
            num_updates=int(is_updated),
            replay=replay,
            agent_grad_norms=agent_grad_norms,
            tokens=tokens,
        )


def empty_step(num_agents: int, lr: float) -> StepStats:
    """The statistics of a step without a trained token on any rank."""
    return ReducedSums(num_agents, (0.0,) * _size(num_agents), 0.0).stats(0.0, lr, (), is_empty=True)


def _size(num_agents: int) -> int:
    return _NUM_FIRST + (len(METRICS) + len(_OUR_SUMS)) * num_agents


def _mismatch(batch: PackedBatch, result: HeadResult, *, counts_samples: bool) -> tuple[Tensor, Tensor]:
    """[loss, gated samples, compared tokens, sum |dp|, sum k3] float64, and the largest |dp|.

    counts_samples: False on all but one of the ranks that a sample is cut over.
    """
    zero = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
    gated = result.gate.sum().double() if counts_samples and result.gate is not None else zero
    loss = result.policy.loss.detach().double()
    if batch.rollout_logprobs is None:
        return torch.stack([loss, gated, zero, zero, zero]), zero
    trainer = result.policy.logprobs[batch.trained_rows].double()
    rollout = batch.rollout_logprobs[batch.trained_rows].double()
    difference = (trainer.exp() - rollout.exp()).abs()
    log_ratio = trainer - rollout
    k3 = (log_ratio.exp() - 1 - log_ratio).sum()
    biggest = difference.max() if difference.numel() else zero
    return torch.stack([loss, gated, batch.mask.sum().double(), difference.sum(), k3]), biggest
