"""Forward and backward passes of a policy's model over micro-batches, by megatron's schedule.

work = passes.prepare(update, is_first=True)              # before the first update of a step
results, replay, load = passes.forward_backward(work)     # in each update
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.kl_reward import KlToGo
from marsrl.trainer.learner.megatron.adapter import ActiveAdapters, Bank
from marsrl.trainer.learner.megatron.balance import Counts, ExpertLoad, balance_experts, count_experts
from marsrl.trainer.learner.megatron.context import ContextCut, cut
from marsrl.trainer.learner.megatron.head import HeadResult, PolicyModel
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.learner.megatron.router_replay import (
    Choices,
    ReplayCounts,
    experts_of_rank,
    record_experts,
    replay_experts,
)
from marsrl.trainer.machine import training_device


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch of an update, and outputs of the step's initial weights for this rank's part of it.

    loss: inputs of the loss, used only on the last pipeline stage. Its old_logprobs are None if the old policy is the current
        one, its reference_logprobs without a KL term. Both are [T] float32, nats, 0 outside the mask.
    experts: experts to force, for this rank's layers and tokens; None: the router chooses.
    """

    cut: ContextCut
    loss: LossInputs
    experts: Choices | None


@dataclass(frozen=True, slots=True)
class Work:
    """One optimizer update on this rank; without micro-batches if no rank has a trained token.

    num_tokens: computed tokens over all ranks, without padding. num_shared: tokens of the samples that were not computed, because
        another sample of the micro-batch begins with them. num_agents: number of the run's agents. counts: the router's
        choices, if a pass with the update's weights has counted them.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    num_shared: int
    num_agents: int
    counts: Counts | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """Model that megatron's schedule runs: a module around a PolicyModel, and adapters to add to its layers.

    bank: Bank that holds the adapters; None: no adapters. slots: slots of the adapters in the bank, ascending.
    adapter_of: for each agent, index of its adapter in `slots`; (): every agent has the first one.
    """

    module: Any
    bank: Bank | None = None
    slots: tuple[int, ...] = ()
    adapter_of: tuple[int, ...] = ()

    def active(self, batch: PackedBatch, tensor: int) -> ActiveAdapters | None:
        """Return the adapters of this rank's part of a micro-batch, whose samples are grouped by adapter. tensor: TP size."""
        if self.bank is None:
            return None
        self.bank.join()
        slots = [self.slots[self.adapter_of[agent] if self.adapter_of else 0] for agent in batch.agents]
        assert slots == sorted(slots), "samples are not grouped by adapter"
        present = slice(slots[0], slots[-1] + 1)
        last = torch.tensor([bisect_right(slots, slot) for slot in range(present.start, present.stop)])
        ends = batch.runs[last.to(batch.runs.device, non_blocking=True)].long()
        share = batch.num_computed // tensor
        first = share * parallel_state.get_tensor_model_parallel_rank()
        own_ends = (ends - first).clamp(0, share)
        counts, own = (bounds.diff(prepend=bounds.new_zeros(1)) for bounds in (ends, own_ends))
        return ActiveAdapters(self.bank, present, counts, own)


@dataclass(frozen=True, eq=False)
class Passes:
    """Passes of one policy. Every method is collective over all ranks.

    model: the bare model.
    trained: the same model, wrapped for training.
    reference: frozen model of the KL term; None without a KL term.
    aux_loss: coefficient of the router's balancing loss.
    reward_kl_coef: weight of the KL penalty in the reward (kl_reward.py); 0: no penalty.
    """

    model: PolicyModel
    trained: Model
    reference: Model | None
    layout: Layout
    aux_loss: float
    objectives: Sequence[PolicyObjective]
    mpt: MptConfig
    old_policy: Literal["pois", "sais", "recompute"]
    router_replay: Literal["none", "recompute", "rollout"]
    reward_kl_coef: float = 0.0

    def can_join(self, other: Passes) -> bool:
        """Return True if both policies are adapters of one base with the same kind of reference.

        The kinds are: no reference, adapters of the base, and the base alone.
        """
        if self.trained.module is not other.trained.module:
            return False
        references = [passes.reference for passes in (self, other)]
        if None in references:
            return references == [None, None]
        return len({(model.module, model.bank) for model in references if model is not None}) == 1

    def joined(self, others: Sequence[Passes], adapter_of: tuple[int, ...]) -> Passes:
        """Join the passes of policies that share micro-batches: their adapters have one base, and so have their references.

        adapter_of: index of each agent's policy among self, *others.
        """
        trained = _joined([self.trained, *(other.trained for other in others)], adapter_of)
        references = [passes.reference for passes in (self, *others) if passes.reference is not None]
        return replace(self, trained=trained, reference=_joined(references, adapter_of) if references else None)

    def score(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return log-probs of each batch, [T] float32 on the CPU, nats, 0 outside its mask; the router chooses experts."""
        self._agree(batches, trains=False)
        cuts = self._cut(batches)
        part_logprobs = self._forward([context_cut.batch for context_cut in cuts])
        return [context_cut.whole(part) for context_cut, part in zip(cuts, part_logprobs, strict=True)]

    @torch.no_grad()
    def prepare(self, update: Update, *, is_first: bool) -> Work:
        """Compute an update's old and reference log-probs, KL penalties and experts to force.

        Call it for all updates of a step before the first optimizer step, because it uses the current weights.

        is_first: True for the step's first update, whose old policy is the current one (pois).

        Raises ValueError on all ranks if any micro-batch does not fit mpt.scope or trainer.router_replay.
        """
        num_trained, num_tokens, num_shared = self._agree(update.micro_batches)
        if num_trained == 0:
            return Work((), num_tokens, num_shared, len(self.objectives))
        if not update.normaliser > 0:
            raise ValueError(
                f"learner: normaliser is {update.normaliser} with {num_trained} trained tokens; expected above 0"
            )
        cuts = self._cut(update.micro_batches)
        batches = [context_cut.batch for context_cut in cuts]
        with count_experts(self.model) as counts:
            old, experts = self._old(batches, is_first)
        reference: Sequence[Tensor | None] = [None] * len(batches)
        penalties: Sequence[Tensor | None] = reference
        if self.reference is not None:
            if any(batch.rollout_logprobs is None for batch in batches):
                raise ValueError("loss.kl needs rollout log-probs, but these samples have none")
            reference = logprobs_of_reference = self._forward(batches, self.reference)
            if self.reward_kl_coef:
                penalties = self._penalties(cuts, logprobs_of_reference)
        micro_batches = (
            MicroBatch(
                context_cut, self._loss(context_cut.batch, update.normaliser, logprobs, of_reference, penalty), choices
            )
            for context_cut, logprobs, of_reference, penalty, choices in zip(
                cuts, old, reference, penalties, experts, strict=True
            )
        )
        present = counts() if is_first and self.aux_loss else None  # Later updates have other weights.
        return Work(tuple(micro_batches), num_tokens, num_shared, len(self.objectives), present)

    def forward_backward(
        self, work: Work, agent: int | None = None
    ) -> tuple[list[HeadResult], ReplayCounts | None, ExpertLoad | None]:
        """Add the gradient of the update's loss to DDP's buffers.

        agent: add only the gradient of this agent's terms. Masks, gates and denominators are the update's, so the agents' shares
            add up to its gradient; the router's balancing loss belongs to no agent.

        Returns:
            The results of this rank's micro-batches, empty before the last pipeline stage; the effect of expert replay; the load
            of experts.
        """

        def forward_step(
            data: Iterator[tuple[PackedBatch, LossInputs]], model: Any, return_schedule_plan: bool = False
        ) -> tuple[Any, Any]:
            batch, loss = next(data)
            active = self.trained.active(batch, self.layout.tensor)
            if return_schedule_plan:  # policies.<name>.overlap_dispatch
                return self.model.plan(batch, loss, self.mpt, active)
            return model(batch, loss, self.mpt, active), _loss_of

        losses = [
            micro_batch.loss if agent is None else _only_of(agent, micro_batch.loss)
            for micro_batch in work.micro_batches
        ]
        data = [(micro_batch.cut.batch, loss) for micro_batch, loss in zip(work.micro_batches, losses, strict=True)]
        aux_loss = self.aux_loss if agent is None else 0.0
        counts = self._count(work) if aux_loss and work.counts is None and len(data) > 1 else work.counts
        with (
            self._replay([micro_batch.experts for micro_batch in work.micro_batches]) as replayed,
            balance_experts(self.model, aux_loss, work.num_tokens, counts) as load,
        ):
            results = self._schedule(forward_step, data, data[0][0].num_computed, has_backward=True)
        return results, replayed() if replayed is not None else None, load()

    def _agree(self, batches: Sequence[PackedBatch], *, trains: bool = True) -> tuple[int, int, int]:
        """Return (trained tokens, computed tokens without padding, shared tokens that are not computed) over all ranks.

        Raises ValueError on all ranks if any batch does not fit mpt.scope or trainer.router_replay.
        """
        problem = 0
        lacks_experts = any(batch.routed_experts is None and batch.trained_rows.numel() for batch in batches)
        if self.mpt.scope == "batch" and len(batches) > 1:
            problem = 1
        elif trains and self.router_replay == "rollout" and lacks_experts:
            problem = 2
        counts, trained = len(batches), sum(batch.trained_rows.numel() for batch in batches)
        num_tokens = sum(batch.num_computed - batch.is_padding.sum() for batch in batches)
        counted = torch.tensor([trained, sum(batch.num_shared for batch in batches)], device=training_device())
        share = torch.cat([counted, torch.as_tensor(num_tokens).view(1)])
        extremes = torch.tensor([problem, counts, -counts], device=training_device())
        dist.all_reduce(share)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        problem, most, fewest = int(extremes[0]), int(extremes[1]), -int(extremes[2])
        assert most == fewest > 0, f"ranks bring {fewest} to {most} micro-batches"
        if problem == 1:
            raise ValueError(
                f"mpt.scope=batch needs the entropy of the whole batch before its loss, so one micro-batch per rank; "
                f"a rank has {most}: raise trainer.max_tokens_per_micro_batch or set mpt.scope=sample"
            )
        if problem == 2:
            raise ValueError(
                "trainer.router_replay=rollout needs the experts chosen in decoding, but these samples have none"
            )
        copies = self.layout.tensor * self.layout.pipeline * self.layout.context
        trained, num_shared, num_tokens = (number // copies for number in share.tolist())
        return trained, num_tokens, num_shared

    def _cut(self, batches: Sequence[PackedBatch]) -> list[ContextCut]:
        """Return this rank's part of each batch, which all context-parallel ranks have received."""
        rank = parallel_state.get_context_parallel_rank()
        return [cut(batch, rank, self.layout.context, self.layout.tensor) for batch in batches]

    def _old(
        self, batches: Sequence[PackedBatch], is_first: bool
    ) -> tuple[Sequence[Tensor | None], Sequence[Choices | None]]:
        """Return (log-probs of the old policy, experts to force) for each batch; None where the update needs none.

        With trainer.router_replay=recompute, one forward pass gives both.
        """
        nones: Sequence[None] = [None] * len(batches)
        is_needed = self.old_policy == "recompute" or (self.old_policy == "pois" and not is_first)
        old: Sequence[Tensor | None] = nones
        experts: Sequence[Choices | None] = nones
        if self.router_replay == "recompute":
            with record_experts(self.model) as recorded:
                old_logprobs = self._forward(batches)
            old, experts = old_logprobs if is_needed else nones, recorded
        else:
            if self.router_replay == "rollout":
                experts = [
                    experts_of_rank(self.model, batch.routed_experts) if batch.routed_experts is not None else None
                    for batch in batches
                ]
            if is_needed:
                with self._replay(experts):  # Old and new log-probs use the same experts.
                    old = self._forward(batches)
        if self.old_policy == "sais":
            if any(batch.rollout_logprobs is None for batch in batches):
                raise ValueError("loss.old_policy=sais needs rollout log-probs, but these samples have none")
            old = [batch.rollout_logprobs for batch in batches]
        return old, experts

    def _penalties(self, cuts: Sequence[ContextCut], reference: Sequence[Tensor]) -> list[Tensor]:
        """Return the KL penalty to subtract from each token's advantage, [T'] per micro-batch (kl_reward.py)."""
        to_go = []
        for context_cut, logprobs in zip(cuts, reference, strict=True):
            assert context_cut.batch.rollout_logprobs is not None  # Checked by prepare().
            log_ratio = torch.where(context_cut.batch.mask, context_cut.batch.rollout_logprobs - logprobs, 0.0)
            bounds, mask = context_cut.given.cu_seqlens.cpu(), context_cut.given.mask.cpu()
            to_go.append(KlToGo.of(context_cut.whole(log_ratio), mask, bounds, torch.tensor(context_cut.given.agents)))
        totals = torch.stack([kl.totals(len(self.objectives)) for kl in to_go]).sum(0).to(training_device())
        dist.all_reduce(totals)
        # Tensor-, pipeline- and context-parallel ranks computed the same sums, so the all-reduce counted each several times.
        totals = totals.cpu() / (self.layout.tensor * self.layout.pipeline * self.layout.context)
        return [
            self.reward_kl_coef * context_cut.own(kl.centred(totals))
            for context_cut, kl in zip(cuts, to_go, strict=True)
        ]

    def _loss(
        self,
        batch: PackedBatch,
        normaliser: float,
        old_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
        penalty: Tensor | None,
    ) -> LossInputs:
        token_advantages = batch.token_advantages
        if penalty is not None:
            of_reward = batch.of_tokens(batch.advantages) if token_advantages is None else token_advantages
            token_advantages = of_reward - penalty
        # A micro-batch has one objective (scatter.py).
        (objective,) = {self.objectives[agent] for agent in batch.agents}
        return LossInputs(
            objective=objective,
            cu_seqlens=batch.cu_seqlens,
            normaliser=normaliser,
            advantages=batch.advantages if token_advantages is None else None,
            token_advantages=token_advantages,
            mask=batch.mask,
            agent_of=batch.agent_of,
            num_agents=len(self.objectives),
            old_logprobs=old_logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            reference_logprobs=reference_logprobs,
            weights=batch.weights,
        )

    @torch.no_grad()
    def _count(self, work: Work) -> Counts | None:
        """Count the router's choices under the current weights, by a forward pass without the head."""
        batches = [micro_batch.cut.batch for micro_batch in work.micro_batches]
        headless = [replace(batch, trained_rows=batch.trained_rows[:0]) for batch in batches]
        with (
            self._replay([micro_batch.experts for micro_batch in work.micro_batches]),
            count_experts(self.model) as counts,
        ):
            self._forward(headless)
        return counts()

    def _replay(self, experts: Sequence[Choices | None]) -> Any:
        return nullcontext() if self.router_replay == "none" else replay_experts(self.model, experts)

    def _forward(self, batches: Sequence[PackedBatch], model_to_run: Model | None = None) -> list[Tensor]:
        """Return the last stage's log-probs [T], nats, on every stage. model_to_run: default: the policy's."""
        runner = model_to_run or self.trained

        def forward_step(data: Iterator[PackedBatch], model: Any) -> tuple[Any, Any]:
            batch = next(data)
            return model(batch, active=runner.active(batch, self.layout.tensor)), _as_it_is

        outputs = self._schedule(forward_step, batches, batches[0].num_computed, module=runner.module)
        if self.layout.pipeline > 1:
            if not parallel_state.is_pipeline_last_stage():
                outputs = [torch.empty(batch.num_tokens, device=training_device()) for batch in batches]
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            for output in outputs:
                dist.broadcast(output, source, group=parallel_state.get_pipeline_model_parallel_group())
        return outputs

    def _schedule(
        self, forward_step: Any, data: Sequence[Any], seq_length: int, *, has_backward: bool = False, module: Any = None
    ) -> list[Any]:
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=[self.trained.module if module is None else module],
            num_microbatches=len(data),
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=not has_backward,
        )


def _joined(models: Sequence[Model], adapter_of: tuple[int, ...]) -> Model:
    slots = tuple(slot for model in models for slot in model.slots)
    return replace(models[0], slots=slots, adapter_of=adapter_of)


def _only_of(agent: int, loss: LossInputs) -> LossInputs:
    """Return the loss with all terms of other agents' tokens set to 0."""
    assert loss.agent_of is not None
    weights = torch.ones(len(loss.agent_of), device=loss.agent_of.device) if loss.weights is None else loss.weights
    return replace(loss, weights=weights * (loss.agent_of == agent))


def _loss_of(result: HeadResult) -> tuple[Tensor, Tensor, HeadResult]:
    """Return megatron's 3-tuple: the loss (which it may change in place), an unused token count, the result to return."""
    return result.policy.loss.clone(), torch.zeros((), dtype=torch.int, device=result.policy.loss.device), result


def _as_it_is(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return output.sum(), torch.zeros((), dtype=torch.int, device=output.device), output
