"""Statistics of each optimizer update, over micro-batches and ranks, and their summary over a step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels import raise_bad_values, token_marks
from marsrl.kernels.head.objective import METRICS
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.learner.trained_tokens import CLIPPED, GATED, MASKED, TrainedSample, TrainedTokens
from marsrl.trainer.machine import training_device

if TYPE_CHECKING:  # megatron is imported when a Learner is built, after the CPU shim is installed.
    from marsrl.trainer.learner.megatron.balance import ExpertLoad
    from marsrl.trainer.learner.megatron.context import ContextCut
    from marsrl.trainer.learner.megatron.head import HeadResult
    from marsrl.trainer.learner.megatron.passes import MicroBatch, Work
    from marsrl.trainer.learner.megatron.router_replay import ReplayCounts

_COUNTS = ("gated", "compared", "difference", "k3")
_SUMS = (*METRICS, "nll", "weighted_nll")  # Summed per agent, like _COUNTS.


@dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer update, or of a step, over all ranks and micro-batches; the same on every rank.

    loss: the minimised value (divided by the normaliser). grad_norm: norm of the gradient before clipping.
    is_skipped: loss or gradient was not finite on some rank, so no rank updated.
    is_empty: no trained token on any rank; nothing was computed.
    agent_sums: {metric: one number per agent}: loss, clipped_tokens, masked_tokens (DMMPT, correction), clamped_tokens,
        entropy and kl (sums in nats), tokens, nll (-sum log p), weighted_nll (nll with token weights, for supervised training).
    prob_diff_mean, prob_diff_max: |p_trainer - p_rollout| over trained tokens; k3: mean of r - 1 - log r with
        r = p_trainer / p_rollout (an estimate of KL(rollout || trainer), nats). NaN where rollout log-probs are unknown.
    num_updates: optimizer updates that changed the weights.
    num_tokens: computed tokens of all policies that share the micro-batches. num_shared: their samples' tokens that were not
        computed, because another sample begins with them (trainer.shared_prefixes).
    replay: forced experts compared with the router's own choice; None if none were forced.
    load: load of experts by the router's own choice; None without experts.
    agent_grad_norms: norm of each agent's share of the gradient, before clipping; None for an agent without a trained token; ()
        if not measured.
    tokens: tokens of the requested samples, each on exactly one rank.
    samples: the trained part of each sample, on this rank only.
    """

    loss: float
    grad_norm: float
    lr: float
    is_skipped: bool
    is_empty: bool
    agent_sums: dict[str, tuple[float, ...]]
    gated_samples: int
    prob_diff_mean: float
    prob_diff_max: float
    k3: float
    num_updates: int = 0
    num_tokens: int = 0
    num_shared: int = 0
    replay: ReplayCounts | None = None
    load: ExpertLoad | None = None
    agent_grad_norms: tuple[float | None, ...] = ()
    tokens: tuple[TrainedTokens, ...] = ()
    samples: tuple[TrainedSample, ...] = ()

    @property
    def is_updated(self) -> bool:
        """True if the weights changed."""
        return self.num_updates > 0


def empty_update(num_agents: int, lr: float) -> StepStats:
    """Return the statistics of an update without a trained token on any rank."""
    zeros = dict.fromkeys(_SUMS, (0.0,) * num_agents)
    return StepStats(0.0, 0.0, lr, False, True, zeros, 0, math.nan, math.nan, math.nan)


def update_stats(
    work: Work,
    results: Sequence[HeadResult],
    *,
    grad_norms: Sequence[float],
    rates: Sequence[float],
    replay: ReplayCounts | None,
    load: ExpertLoad | None,
    agent_grad_norms: Sequence[tuple[float | None, ...]],
    keep: frozenset[str],
    agents: Sequence[frozenset[int] | None],
) -> list[StepStats]:
    """Compute each policy's statistics of an update after its backward pass. Collective; the host waits for the device here.

    results: results of this rank's micro-batches; empty before the last pipeline stage.
    keep: uids of samples whose tokens to return.
    agents: each policy's agents, if several policies share the micro-batches, and None for the only policy of an update.
    """
    from megatron.core import parallel_state

    device, width = training_device(), work.num_agents
    totals = torch.zeros(1 + len(_COUNTS + _SUMS) * width, dtype=torch.float64, device=device)
    largest = torch.zeros(width, dtype=torch.float64, device=device)
    # Tensor-parallel ranks see the same micro-batches, so one of them counts. Context-parallel ranks hold parts of a sample.
    counts = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    counts_samples = counts and parallel_state.get_context_parallel_rank() == 0
    pairs = list(zip(work.micro_batches, results, strict=bool(results)))
    for micro_batch, result in pairs if counts else ():
        batch, policy = micro_batch.cut.batch, result.policy
        compared, biggest = _mismatch(batch, result, width, counts_samples=counts_samples)
        of_agents = [policy.agent_sums[name].double() for name in METRICS]
        whole_loss = policy.loss.detach().double()[None]
        totals += torch.cat([whole_loss, *compared, *of_agents, *_nll(batch, policy.logprobs, width)])
        largest = torch.maximum(largest, biggest)
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    loss_of_all, *numbers = totals.tolist()
    biggest_of = largest.tolist()
    raise_bad_values()  # The values are already on the host.
    sums = {name: tuple(numbers[i * width : (i + 1) * width]) for i, name in enumerate(_COUNTS + _SUMS)}
    samples = _samples(pairs) if counts else []
    tokens: list[TrainedTokens] = []
    for micro_batch, result in pairs:
        if not keep.isdisjoint(micro_batch.cut.given.uids):
            sample_tokens = _tokens(micro_batch.cut, result, keep)
            tokens += sample_tokens if counts_samples else []
    agent_of = {
        uid: agent
        for micro_batch, _ in pairs
        for uid, agent in zip(micro_batch.cut.given.uids, micro_batch.cut.given.agents)
    }
    stats = []
    for policy_agents, grad_norm, lr, norms in zip(agents, grad_norms, rates, agent_grad_norms, strict=True):
        is_own = [policy_agents is None or agent in policy_agents for agent in range(width)]
        own_sums = {
            name: tuple(value if is_in else 0.0 for value, is_in in zip(sums[name], is_own, strict=True))
            for name in sums
        }
        loss = loss_of_all if policy_agents is None else math.fsum(own_sums["loss"])
        if policy_agents is not None and not any(own_sums["tokens"]):
            stats.append(empty_update(width, lr))
            continue
        is_finite = math.isfinite(grad_norm) and math.isfinite(loss)
        gated, num_compared, difference, k3 = (math.fsum(own_sums.pop(name)) for name in _COUNTS)
        stats.append(
            StepStats(
                loss=loss,
                grad_norm=grad_norm,
                lr=lr,
                is_skipped=not is_finite,
                is_empty=False,
                agent_sums=own_sums,
                gated_samples=round(gated) if math.isfinite(gated) else 0,
                prob_diff_mean=difference / num_compared if num_compared else math.nan,
                prob_diff_max=max(itertools.compress(biggest_of, is_own)) if num_compared else math.nan,
                k3=k3 / num_compared if num_compared else math.nan,
                num_updates=int(is_finite),
                num_tokens=work.num_tokens,
                num_shared=work.num_shared,
                replay=replay,
                load=load,
                agent_grad_norms=norms,
                tokens=tuple(each for each in tokens if is_own[agent_of[each.uid]]),
                samples=tuple(
                    TrainedSample(uid, num, gap, is_finite) for uid, agent, num, gap in samples if is_own[agent]
                ),
            )
        )
    return stats


def _samples(pairs: Sequence[tuple[MicroBatch, HeadResult]]) -> list[tuple[str, int, int, float]]:
    """Return (uid, agent, trained tokens, sum of their |log p_trainer - log p_rollout|) of the trained parts of all samples.

    The host waits for the device once.
    """
    batches = [micro_batch.cut.batch for micro_batch, _ in pairs]
    sums = []
    for batch, (_, result) in zip(batches, pairs, strict=True):
        rows, zeros = batch.trained_rows, torch.zeros(2, len(batch.uids), dtype=torch.float64, device=batch.mask.device)
        gaps = torch.full_like(rows, torch.nan, dtype=torch.float64)
        if batch.rollout_logprobs is not None:
            gaps = (result.policy.logprobs[rows] - batch.rollout_logprobs[rows]).double().abs()
        sequence = batch.of_tokens(torch.arange(len(batch.uids), device=rows.device))[rows]
        sums.append(zeros.index_add(1, sequence, torch.stack([torch.ones_like(gaps), gaps])))
    numbers, gaps_of = torch.cat(sums, 1).tolist() if sums else ([], [])
    uids = [uid for batch in batches for uid in batch.uids]
    agent_of = [agent for batch in batches for agent in batch.agents]
    return [each for each in zip(uids, agent_of, map(round, numbers), gaps_of, strict=True) if each[2]]


def _mismatch(
    batch: PackedBatch, result: HeadResult, num_agents: int, *, counts_samples: bool
) -> tuple[list[Tensor], Tensor]:
    """Return gated samples, compared tokens, sum |dp| and sum k3, and the largest |dp|, each [A] float64, by agent.

    counts_samples: True on one of the ranks that share a sample.
    """
    zeros = torch.zeros(num_agents, dtype=torch.float64, device=batch.mask.device)
    gated = zeros
    if counts_samples and result.gate is not None:
        gated = zeros.index_add(0, batch.agent_of, result.gate.double())
    if batch.rollout_logprobs is None:
        return [gated, zeros, zeros, zeros], zeros
    rows = batch.trained_rows
    agent_of = batch.of_tokens(batch.agent_of)[rows]
    trainer, rollout = result.policy.logprobs[rows].double(), batch.rollout_logprobs[rows].double()
    difference, log_ratio = (trainer.exp() - rollout.exp()).abs(), trainer - rollout
    k3 = log_ratio.exp() - 1 - log_ratio
    sums = [zeros.index_add(0, agent_of, values) for values in (torch.ones_like(k3), difference, k3)]
    return [gated, *sums], zeros.scatter_reduce(0, agent_of, difference, "amax")


def _nll(batch: PackedBatch, logprobs: Tensor, num_agents: int) -> list[Tensor]:
    """Return the sum of -log p, and the same sum weighted by token, each [A] float64."""
    weighted = -logprobs if batch.token_advantages is None else -logprobs * batch.token_advantages
    empty = torch.zeros(num_agents, dtype=torch.float64, device=logprobs.device)
    agent_of = batch.of_tokens(batch.agent_of)
    return [empty.index_add(0, agent_of, values.double()) for values in (-logprobs, weighted)]


def _tokens(cut: ContextCut, result: HeadResult, uids: frozenset[str]) -> list[TrainedTokens]:
    """Return the tokens of the samples with these uids. Collective over the context group."""
    token_marks_ = token_marks(result.policy.logprobs, result.policy.entropy, result.inputs)
    bits = ((CLIPPED, token_marks_.clipped), (GATED, token_marks_.gated), (MASKED, token_marks_.masked))
    own_marks = torch.stack([is_set.to(torch.uint8) * bit for bit, is_set in bits]).sum(0, dtype=torch.uint8)
    logprobs, entropy, marks = map(cut.whole, (result.policy.logprobs, result.policy.entropy, own_marks))
    bounds, mask = cut.given.cu_seqlens.tolist(), cut.given.mask.cpu()
    tokens = []
    for uid, start, end in zip(cut.given.uids, bounds[:-1], bounds[1:], strict=True):
        if uid in uids:
            rows = start + mask[start:end].nonzero()[:, 0]
            tokens.append(TrainedTokens(uid, logprobs[rows].numpy(), entropy[rows].numpy(), marks[rows].numpy()))
    return tokens


def summed(stats: Sequence[StepStats]) -> StepStats:
    """Summarise a step's updates.

    loss, grad_norm, agent_grad_norms, load.aux_loss: means over the non-empty updates; an agent without a token in an update has
        norm 0 there.
    load.largest, load.smallest: extremes over the updates.
    counts and sums: added.
    is_skipped: True if any update was skipped.
    tokens, samples: those of all updates, each with the update's number.
    prob_diff_mean, prob_diff_max, k3: values of the first update only, because later updates have other weights.
    """
    computed = [update for update in stats if not update.is_empty]
    if not computed:
        return stats[0]
    first = computed[0]
    replays = [update.replay for update in computed if update.replay is not None]
    loads = [update.load for update in computed if update.load is not None]
    return dataclasses.replace(
        first,
        loss=math.fsum(update.loss for update in computed) / len(computed),
        grad_norm=math.fsum(update.grad_norm for update in computed) / len(computed),
        is_skipped=any(update.is_skipped for update in computed),
        agent_sums={
            name: tuple(map(math.fsum, zip(*(update.agent_sums[name] for update in computed), strict=True)))
            for name in first.agent_sums
        },
        gated_samples=sum(update.gated_samples for update in computed),
        num_updates=sum(update.num_updates for update in computed),
        num_tokens=sum(update.num_tokens for update in computed),
        num_shared=sum(update.num_shared for update in computed),
        replay=type(replays[0])(*map(sum, zip(*replays, strict=True))) if replays else None,
        load=type(loads[0])(
            math.fsum(load.aux_loss for load in loads) / len(loads),
            max(load.largest for load in loads),
            min(load.smallest for load in loads),
        )
        if loads
        else None,
        agent_grad_norms=tuple(
            None if set(norms) == {None} else math.fsum(norm or 0.0 for norm in norms) / len(norms)
            for norms in zip(*(update.agent_grad_norms for update in computed), strict=True)
        ),
        tokens=tuple(
            dataclasses.replace(tokens, update=number)
            for number, update in enumerate(stats, start=1)
            for tokens in update.tokens
        ),
        samples=tuple(
            dataclasses.replace(sample, update=number)
            for number, update in enumerate(stats, start=1)
            for sample in update.samples
        ),
    )
