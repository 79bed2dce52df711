"""Statistics of each optimizer update, over micro-batches and ranks, and their summary over a step."""

from __future__ import annotations

import dataclasses
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

_SUMS = (*METRICS, "nll", "weighted_nll")  # Summed per agent.


@dataclass(frozen=True)
class StepStats:
    """Statistics of one optimizer update, or of a step, over all ranks and micro-batches; the same on every rank.

    loss: the minimised value (divided by the normaliser). grad_norm: before clipping.
    is_skipped: loss or gradient was not finite on some rank, so no rank updated.
    is_empty: no trained token on any rank; nothing was computed.
    agent_sums: {metric: one number per agent}: loss, clipped_tokens, masked_tokens (DMMPT, correction), clamped_tokens,
        entropy and kl (sums in nats), tokens, nll (-sum log p), weighted_nll (the same times token weights; supervised training).
    prob_diff_mean, prob_diff_max: |p_trainer - p_rollout| over trained tokens; k3: mean of r - 1 - log r with
        r = p_trainer / p_rollout (an estimate of KL(rollout || trainer), nats). NaN where rollout log-probs are unknown.
    num_updates: optimizer updates that changed the weights.
    num_tokens, num_shared: tokens that were computed, over all policies that share the micro-batches; and tokens of samples that
        were not, because another sample begins with them (trainer.shared_prefixes).
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
    grad_norm: float,
    lr: float,
    replay: ReplayCounts | None,
    load: ExpertLoad | None,
    agent_grad_norms: tuple[float | None, ...],
    keep: frozenset[str],
    agents: frozenset[int] | None = None,
) -> StepStats:
    """Compute the statistics of an update after its backward pass. Collective; the host waits for the device here.

    results: results of this rank's micro-batches; empty before the last stage. keep: uids of samples whose tokens to return.
    agents: agents of one policy, if several policies share the micro-batches; the loss is then over these agents.
    """
    from megatron.core import parallel_state

    device, width = training_device(), work.num_agents
    totals = torch.zeros(5 + len(_SUMS) * width, dtype=torch.float64, device=device)
    largest = torch.zeros((), dtype=torch.float64, device=device)
    # Tensor-parallel ranks see the same micro-batches, so one of them counts. Context-parallel ranks hold parts of a sample.
    counts = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    counts_samples = counts and parallel_state.get_context_parallel_rank() == 0
    pairs = list(zip(work.micro_batches, results, strict=bool(results)))
    for micro_batch, result in pairs if counts else ():
        first, biggest = _mismatch(micro_batch.cut.batch, result, counts_samples=counts_samples, agents=agents)
        of_agents = [result.policy.agent_sums[name].double() for name in METRICS]
        totals += torch.cat([first, *of_agents, *_nll(micro_batch.cut.batch, result.policy.logprobs, width)])
        largest = torch.maximum(largest, biggest)
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    loss, gated, compared, difference, k3, *sums = totals.tolist()
    if agents is not None:
        sums = [value if i % width in agents else 0.0 for i, value in enumerate(sums)]
        loss = math.fsum(sums[:width])
        if not any(sums[_SUMS.index("tokens") * width : (_SUMS.index("tokens") + 1) * width]):
            return empty_update(width, lr)
    raise_bad_values()  # The values are already on the host.
    is_finite = math.isfinite(grad_norm) and math.isfinite(loss)
    if agents is not None:
        whole_batches = (micro_batch.cut.given for micro_batch in work.micro_batches)
        keep &= {
            uid
            for whole_batch in whole_batches
            for uid, agent in zip(whole_batch.uids, whole_batch.agents)
            if agent in agents
        }
    samples = _samples(pairs, agents, is_applied=is_finite) if counts else []
    tokens: list[TrainedTokens] = []
    for micro_batch, result in pairs:
        if not keep.isdisjoint(micro_batch.cut.given.uids):
            sample_tokens = _tokens(micro_batch.cut, result, keep)
            tokens += sample_tokens if counts_samples else []
    return StepStats(
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        is_skipped=not is_finite,
        is_empty=False,
        agent_sums={name: tuple(sums[i * width : (i + 1) * width]) for i, name in enumerate(_SUMS)},
        gated_samples=round(gated) if math.isfinite(gated) else 0,
        prob_diff_mean=difference / compared if compared else math.nan,
        prob_diff_max=float(largest) if compared else math.nan,
        k3=k3 / compared if compared else math.nan,
        num_updates=int(is_finite),
        num_tokens=work.num_tokens,
        num_shared=work.num_shared,
        replay=replay,
        load=load,
        agent_grad_norms=agent_grad_norms,
        tokens=tuple(tokens),
        samples=tuple(samples),
    )


def _samples(
    pairs: Sequence[tuple[MicroBatch, HeadResult]], agents: frozenset[int] | None, *, is_applied: bool
) -> list[TrainedSample]:
    """Return the trained parts of these agents' samples (None: of all agents); the host waits for the device once."""
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
    return [
        TrainedSample(uid, round(number), gap, is_applied)
        for uid, agent, number, gap in zip(uids, agent_of, numbers, gaps_of, strict=True)
        if number and (agents is None or agent in agents)
    ]


def _mismatch(
    batch: PackedBatch, result: HeadResult, *, counts_samples: bool, agents: frozenset[int] | None
) -> tuple[Tensor, Tensor]:
    """Return [loss, gated samples, compared tokens, sum |dp|, sum k3] float64, and the largest |dp|.

    All but the loss are for these agents. counts_samples: True on one of the ranks that share a sample.
    """
    zero = torch.zeros((), dtype=torch.float64, device=batch.mask.device)
    rows, gate, mask = batch.trained_rows, result.gate, batch.mask
    if agents is not None:
        is_own = torch.tensor([agent in agents for agent in batch.agents], device=mask.device)
        mask = mask & batch.of_tokens(is_own)
        rows, gate = mask.nonzero()[:, 0], gate & is_own if gate is not None else None
    gated = gate.sum().double() if counts_samples and gate is not None else zero
    loss = result.policy.loss.detach().double()
    if batch.rollout_logprobs is None:
        return torch.stack([loss, gated, zero, zero, zero]), zero
    trainer = result.policy.logprobs[rows].double()
    rollout = batch.rollout_logprobs[rows].double()
    difference = (trainer.exp() - rollout.exp()).abs()
    log_ratio = trainer - rollout
    k3 = (log_ratio.exp() - 1 - log_ratio).sum()
    biggest = difference.max() if difference.numel() else zero
    return torch.stack([loss, gated, mask.sum().double(), difference.sum(), k3]), biggest


def _nll(batch: PackedBatch, logprobs: Tensor, num_agents: int) -> list[Tensor]:
    """Return the sum of -log p, and the same times token weights, each [A] float64."""
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

    loss, grad_norm, agent_grad_norms, load.aux_loss: means over the non-empty updates; the share of an agent without a token in
    an update counts as 0. Other loads: the largest and the smallest. Counts and sums: added. is_skipped: any update was not
    finite. tokens, samples: those of all updates, each with its update's number. The comparison with the rollout uses only
    the first update: later updates have other weights.
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
