"""The learner of one policy: packed micro-batches in, one optimizer step, statistics out. The same on CPU and GPUs.

    learner = Learner(policy, "models/qwen3", objective=PolicyObjective(), mpt=MptConfig(), num_agents=5,
                      total_steps=32, seed=0)
    stats = learner.step(micro_batches, normaliser=float(num_tokens))    # all ranks
    for name, tensor in learner.export(): ...                            # all ranks; tensors on rank 0

Nothing here draws random numbers after construction (no dropout), so a checkpoint holds weights, optimizer and step.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, raise_bad_values
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import MptConfig, PolicyConfig
from marsrl.trainer.config.agreement import NO_INPUTS_TO_OFFLOAD_ON_CPU, NO_OFFLOAD_ON_CPU
from marsrl.trainer.data.packing import Clip, PackedBatch
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.hf_files import copy_frame
from marsrl.trainer.learner.megatron.layout import check, resolve, why_not_context
from marsrl.trainer.learner.other_roundings import other_roundings
from marsrl.trainer.learner.passes import Passes
from marsrl.trainer.learner.step_stats import StepStats, StepSums, empty_step
from marsrl.trainer.learner.trained_tokens import TrainedTokens, marks_of, tokens_of
from marsrl.trainer.machine import training_device
from marsrl.trainer.runs.collective import Routes
from marsrl.trainer.runs.directory import write_json

if TYPE_CHECKING:  # megatron is imported when a Learner is made: after the CPU shim is in force
    from marsrl.trainer.learner.megatron.checkpoint_store import PendingSave
    from marsrl.trainer.learner.megatron.context import ContextCut
    from marsrl.trainer.learner.megatron.convert import Converter
    from marsrl.trainer.learner.megatron.head import HeadResult
    from marsrl.trainer.learner.megatron.router_replay import Choices, ReplayCounts


@dataclass(frozen=True, slots=True)
class OldPolicy:
    """Outputs of a step's initial weights for a micro-batch, this rank's part: shared by all updates of the step.

    logprobs: [T] float32, nats, 0 outside the mask; None: pseudo on-policy. reference_logprobs: the same of the frozen
        reference; None: no KL term. On pipeline stages before the last nobody reads them.
    experts: {MoE layer, from 0 in the whole model: [T, K] uint8 or int16}, the experts to force, for this rank's layers
        and its part of the tokens; None: the router chooses.
    """

    logprobs: Tensor | None
    reference_logprobs: Tensor | None
    experts: Choices | None


class Learner:
    """One policy's model and optimizer on this rank. Every method is collective: all ranks call it together."""

    def __init__(
        self,
        policy: PolicyConfig,
        model_dir: str | Path,
        *,
        objective: PolicyObjective,
        mpt: MptConfig,
        num_agents: int,
        total_steps: int,
        seed: int,
        old_policy: Literal["pois", "sais", "recompute"] = "pois",
        router_replay: Literal["none", "recompute", "rollout"] = "none",
        reference_dir: str | Path | None = None,
    ) -> None:
        """Build the model on this layout's process groups (made here where there are none) and read its weights.

        mpt.probability replaces objective.mpt_probability; mpt.scope "off" turns the masking off.
        reference_dir: weights of objective.kl's reference, frozen; read and held only where there is such a term.

        Raises:
            ValueError: the directory or the layout cannot be used; nothing was started then.
        """
        if objective.kl != "none" and reference_dir is None:
            raise ValueError(f"learner: objective.kl is {objective.kl} and reference_dir is None; name its weights")
        shape = read_shape(model_dir)
        layout = resolve(policy.layout)
        check(layout, shape, parallel.world_size())
        if router_replay != "none" and not shape.num_experts:
            raise ValueError(f"trainer.router_replay is {router_replay}, but {shape.architecture} has no experts")
        if (reason := why_not_context(layout, objective.ratio, objective.correction)) is not None:
            raise ValueError(reason)
        if policy.optimizer.offload and not torch.cuda.is_available():
            raise ValueError(NO_OFFLOAD_ON_CPU)
        if policy.recompute == "full_offload" and not torch.cuda.is_available():
            raise ValueError(NO_INPUTS_TO_OFFLOAD_ON_CPU)
        parallel.start(layout, seed)
        from megatron.core import parallel_state

        from marsrl.trainer.learner.megatron.convert import Converter
        from marsrl.trainer.learner.megatron.model import build_model
        from marsrl.trainer.learner.megatron.optimizer import Optimizer

        self._vocab_size = shape.vocab_size
        self._router_replay = router_replay
        self._policy, self._layout, self._model_dir = policy, layout, Path(model_dir)
        probability = None if mpt.scope == "off" else mpt.probability
        self._objective = dataclasses.replace(objective, mpt_probability=probability)
        self._mpt, self._num_agents, self._total_steps, self._old_policy = mpt, num_agents, total_steps, old_policy
        self._model, self._ddp, self._config = build_model(shape, layout, policy)
        self._passes = Passes(
            self._model, self._ddp, layout, num_experts=shape.num_experts, router_replay=router_replay
        )
        self._converter = Converter(self._model, shape)
        self._converter.load(model_dir)
        self._optimizer = Optimizer(self._ddp, policy.optimizer, self._config.params_dtype)
        self._optimizer.reload_weights()
        self._reference: Any = None
        if objective.kl != "none":
            from marsrl.trainer.learner.megatron.reference import frozen_model

            assert reference_dir is not None
            self._reference = frozen_model(reference_dir, layout, policy)
        self._context_group = parallel_state.get_context_parallel_group()
        # Every tensor-parallel rank sees the same micro-batches: one of them counts.
        self._counts = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        self._device = training_device()
        self.num_steps = 0  # steps, skipped and empty ones included: what the schedule counts

    @property
    def align(self) -> int:
        """Alignment of a packed micro-batch's length, tokens (pack's `align`)."""
        return self._layout.tensor

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows, padding of the vocabulary left out."""
        return self._vocab_size

    @property
    def data_rank(self) -> int:
        """This rank's place among the data-parallel ranks: ranks of one place work on the same micro-batches."""
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_rank())

    @property
    def data_size(self) -> int:
        """Number of data-parallel places."""
        from megatron.core import parallel_state

        return int(parallel_state.get_data_parallel_world_size())

    @property
    def routes(self) -> Routes:
        """The way from rank 0 to the ranks of every data-parallel place."""
        return parallel.routes()

    def step(
        self,
        micro_batches: Sequence[PackedBatch],
        *,
        normaliser: float,
        lr: float | None = None,
        old: Sequence[OldPolicy] | None = None,
        is_last: bool = True,
        by_agent: bool = False,
        keep: Collection[str] = (),
    ) -> StepStats:
        """One optimizer step on the sum over ranks and micro-batches of their token losses / normaliser.

        lr: of this step, in place of the policy's schedule.
        old: what old_policy() gave for the same micro-batches before the first of several updates (updates.py); None: now.
        is_last: False where other updates of the same step follow, which share its learning rate.
        by_agent: measure the norm of each agent's share of the gradient too; the step stays the same, bit for bit.
        keep: uids of samples whose tokens the statistics are to have; the same on all ranks.

        Ranks of one data-parallel group bring equally many micro-batches; an empty share is pack([]).

        Raises:
            ValueError: on all ranks together, when the micro-batches of any do not fit (number, alignment, scope).
        """
        from marsrl.trainer.learner.megatron.optimizer import lr_at

        if lr is None:
            lr = lr_at(self.num_steps, self._total_steps, self._policy.optimizer)
        num_trained, num_tokens = self._agree(micro_batches)
        self.num_steps += is_last
        if num_trained == 0:
            return empty_step(self._num_agents, lr)
        if not normaliser > 0:
            raise ValueError(f"learner: normaliser is {normaliser} with {num_trained} trained tokens; expected above 0")
        cuts = self._cut(micro_batches)
        batches = [each.batch for each in cuts]
        if old is None:
            old = self._old(batches, is_first=True)
        shares = self._agent_grad_norms(batches, old, normaliser) if by_agent else ()
        self._set_aux_scale(num_tokens)
        self._optimizer.zero_grad()
        results, replay = self._forward_backward(batches, old, normaliser)
        sums = StepSums(self._num_agents, self._device)
        if self._counts:
            for batch, result in zip(batches, results, strict=True):
                sums.add(batch, result, counts_samples=self._context_group.rank() == 0)
        reduced = sums.reduced()
        raise_bad_values()  # here, where the host waits for the sums anyway
        grad_norm = self._optimizer.grad_norm()
        is_finite = math.isfinite(grad_norm) and math.isfinite(reduced.loss)
        if is_finite:
            self._optimizer.apply(grad_norm, lr)
        logprobs = self._whole(cuts, [result.policy.logprobs for result in results])
        return reduced.stats(
            grad_norm,
            lr,
            logprobs,
            is_skipped=not is_finite,
            replay=replay,
            agent_grad_norms=shares,
            tokens=tuple(self._kept_tokens(keep, micro_batches, cuts, results, logprobs)),
        )

    def old_policy(self, batches: Sequence[PackedBatch], *, is_first: bool) -> list[OldPolicy]:
        """Inputs shared by the updates of one step, under the present weights: computed once, before the first update.

        is_first: of the micro-batches of the first update, for which the old policy is the present one anyway (pois).
        """
        self._agree(batches)
        return self._old([each.batch for each in self._cut(batches)], is_first=is_first)

    @torch.no_grad()
    def score(
        self,
        batches: Sequence[PackedBatch],
        *,
        rounded_as: torch.dtype | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> list[Tensor]:
        """[T] float32 CPU log-probs of each batch under the present weights, nats; 0 outside its mask.

        The router chooses the experts, whatever trainer.router_replay says.
        rounded_as: every result on the way is rounded otherwise, as in another program of that dtype (other_roundings.py).
        cache_dtype: of that program's KV cache, where it is another one.
        """
        self._agree(batches, trains=False)
        cuts = self._cut(batches)
        with nullcontext() if rounded_as is None else other_roundings(self._model, rounded_as, cache_dtype=cache_dtype):
            return self._whole(cuts, self._passes.forward([each.batch for each in cuts]))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole CPU tensor) on rank 0; every rank exhausts the iterator."""
        self._optimizer.gather_weights()
        return self._converter.export()

    def held(self) -> Converter:
        """Exporter of this rank's part of the present weights and of every rank's boxes; nothing is copied."""
        self._optimizer.gather_weights()
        return self._converter

    def save_hf(self, folder: str | Path) -> None:
        """Write the weights as a Hugging Face directory, with config and tokenizer of the one we started from."""
        self._optimizer.gather_weights()
        self._converter.save_hf(folder, self._model_dir)

    def save(self, folder: str | Path) -> None:
        """Model, optimizer and step as a Megatron distributed checkpoint, in a new or empty directory.

        Raises:
            RuntimeError: on all ranks, naming the one that could not write and why.
        """
        pending = self.begin_save(Path(folder), copy=False)
        pending.write()
        pending.finish(f"learner: {folder} was not saved")
        dist.barrier()

    def begin_save(self, folder: Path, *, copy: bool) -> PendingSave:
        """Plan a save into `folder`; with copy=True the rest of it may run beside training."""
        from marsrl.trainer.learner.megatron.checkpoint_store import begin_save, policy_state

        self._optimizer.gather_weights()
        num_steps = self.num_steps

        def write_files(folder: Path) -> None:
            copy_frame(self._model_dir, folder / "hf")  # what `marsrl export` needs beside the weights
            write_json(folder / "learner.json", {"num_steps": num_steps})

        return begin_save(policy_state(self._model, self._optimizer, is_loading=False), folder, write_files, copy=copy)

    def load(self, folder: str | Path) -> None:
        """Restore what save() wrote; under the same layout training goes on bit for bit.

        Raises:
            ValueError: the directory is not a whole checkpoint; with the file that is missing.
        """
        from marsrl.trainer.learner.megatron.checkpoint_store import load, policy_state

        folder = Path(folder)
        if not (folder / "learner.json").is_file():
            raise ValueError(f"learner: {folder} is not a whole checkpoint: it has no learner.json")
        state = load(policy_state(self._model, self._optimizer, is_loading=True), folder)
        missing, unknown = self._model.load_state_dict(state["model"], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        if missing or unknown:
            raise ValueError(f"learner: {folder} lacks {missing} and has {unknown} that the model does not know")
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps = int(json.loads((folder / "learner.json").read_text(encoding="utf-8"))["num_steps"])

    def close(self) -> None:
        """Tear the process groups down."""
        parallel.stop()

    # The pieces of a step.

    def _cut(self, batches: Sequence[PackedBatch]) -> list[ContextCut]:
        """This rank's part of each batch, which all context-parallel ranks were given."""
        from marsrl.trainer.learner.megatron.context import cut

        return [cut(batch, self._context_group.rank(), self._layout.context, self.align) for batch in batches]

    def _whole(self, cuts: Sequence[ContextCut], values: Sequence[Tensor]) -> list[Tensor]:
        """[T] on the CPU, in the frame of the batches as they were given, from this rank's part of each."""
        pairs = zip(cuts, values, strict=bool(values))  # no values before the last stage
        return [each.whole(mine.to(self._device), self._context_group).cpu() for each, mine in pairs]

    def _kept_tokens(
        self,
        keep: Collection[str],
        batches: Sequence[PackedBatch],
        cuts: Sequence[ContextCut],
        results: Sequence[HeadResult],
        logprobs: Sequence[Tensor],
    ) -> Iterator[TrainedTokens]:
        """On the last stage, from one of the ranks that hold a sample. logprobs: whole, as the batches are."""
        keep = frozenset(keep)
        for batch, cut, result, whole in zip(batches, cuts, results, logprobs, strict=bool(results)):
            if keep.isdisjoint(batch.uids):
                continue
            entropy, marks = (self._whole([cut], [mine])[0] for mine in (result.policy.entropy, marks_of(result)))
            if self._counts and self._context_group.rank() == 0:
                yield from tokens_of(batch, keep, whole, entropy, marks)

    def _agree(self, batches: Sequence[PackedBatch], *, trains: bool = True) -> tuple[int, int]:
        """(trained tokens, packed tokens) over all ranks; raises on all ranks when the batches of one do not fit."""
        problem = 0
        if any(batch.num_tokens % self.align for batch in batches):
            problem = 1
        elif self._mpt.scope == "batch" and len(batches) > 1:
            problem = 2
        elif trains and self._router_replay == "rollout" and any(_lacks_experts(batch) for batch in batches):
            problem = 3
        counts = len(batches)
        trained = sum(batch.trained_rows.numel() for batch in batches)
        packed = sum(batch.num_tokens for batch in batches)
        share = torch.tensor([trained, packed], dtype=torch.int64, device=self._device)
        extremes = torch.tensor([problem, counts, -counts], dtype=torch.int64, device=self._device)
        dist.all_reduce(share)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        problem, most, fewest = int(extremes[0]), int(extremes[1]), -int(extremes[2])
        if problem == 1:
            raise ValueError(
                f"learner: a micro-batch's tokens are no multiple of layout.tensor = {self.align}; "
                f"use pack(..., align={self.align}); here: {[batch.num_tokens for batch in batches]}"
            )
        if problem == 2:
            raise ValueError(
                f"mpt.scope=batch needs the entropy of the whole batch before its loss, so one micro-batch a rank; "
                f"a rank has {most}: raise trainer.max_tokens_per_micro_batch or set mpt.scope=sample"
            )
        if problem == 3:
            raise ValueError(
                "trainer.router_replay=rollout needs the experts chosen in decoding, which these samples do not have"
            )
        if most != fewest or most == 0:
            raise ValueError(f"learner: ranks bring {fewest} to {most} micro-batches; expected one number above 0")
        copies = self._layout.tensor * self._layout.pipeline * self._layout.context
        return int(share[0]) // copies, int(share[1]) // copies

    def _set_aux_scale(self, num_tokens: int) -> None:
        """The router's balancing loss as the token-weighted mean over all micro-batches.

        Without megatron's division by tokens it would be a sum over packed tokens; a tensor- or context-parallel rank
        counts its share of them only.
        """
        if self._policy.router_aux_loss > 0 and self._config.num_moe_experts:
            sharers = self._layout.tensor * self._layout.context
            self._config.moe_aux_loss_coeff = self._policy.router_aux_loss * sharers / num_tokens

    @torch.no_grad()
    def _old(self, batches: Sequence[PackedBatch], *, is_first: bool) -> list[OldPolicy]:
        needs_old = self._old_policy == "recompute" or (self._old_policy == "pois" and not is_first)
        scores, experts = self._passes.forward_and_experts(batches, needs_logprobs=needs_old)
        old: Sequence[Tensor | None] = scores
        if self._old_policy == "sais":
            if any(batch.rollout_logprobs is None for batch in batches):
                raise ValueError("loss.old_policy=sais needs rollout log-probs, which these samples do not have")
            old = [batch.rollout_logprobs for batch in batches]
        elif not needs_old:
            old = [None] * len(batches)
        reference: Sequence[Tensor | None] = [None] * len(batches)
        if self._reference is not None:
            reference = self._passes.forward(batches, self._reference)
        return [OldPolicy(*each) for each in zip(old, reference, experts, strict=True)]

    def _forward_backward(
        self, batches: Sequence[PackedBatch], old: Sequence[OldPolicy], normaliser: float
    ) -> tuple[list[HeadResult], ReplayCounts | None]:
        """See Passes.forward_backward."""
        inputs = [self._loss_inputs(*each, normaliser) for each in zip(batches, old, strict=True)]
        return self._passes.forward_backward(batches, inputs, [each.experts for each in old], self._mpt)

    def _agent_grad_norms(
        self, batches: Sequence[PackedBatch], old: Sequence[OldPolicy], normaliser: float
    ) -> tuple[float | None, ...]:
        """One norm an agent, over all ranks: a forward and backward pass each, the weights of the others' samples 0.

        Masks, gates and denominators are those of the step, so the shares add up to its gradient. The router's balancing
        loss is no agent's and in no share. The gradients left behind are the last agent's.
        """
        counts = torch.zeros(self._num_agents, dtype=torch.int64, device=self._device)
        for batch in batches:
            agent_of = batch.agent_of.repeat_interleave(batch.cu_seqlens.diff().long(), output_size=batch.num_tokens)
            counts += agent_of[batch.trained_rows].bincount(minlength=self._num_agents)
        dist.all_reduce(counts)
        self._config.moe_aux_loss_coeff = 0.0  # _set_aux_scale gives it back
        norms: list[float | None] = []
        for agent, count in enumerate(counts.tolist()):
            if count == 0:
                norms.append(None)
                continue
            self._optimizer.zero_grad()
            self._forward_backward([_only_of(agent, batch) for batch in batches], old, normaliser)
            norms.append(self._optimizer.grad_norm())
        return tuple(norms)

    def _loss_inputs(self, batch: PackedBatch, old: OldPolicy, normaliser: float) -> LossInputs:
        return LossInputs(
            objective=_clipped(self._objective, batch.clip),
            cu_seqlens=batch.cu_seqlens,
            normaliser=normaliser,
            advantages=batch.advantages if batch.token_advantages is None else None,
            token_advantages=batch.token_advantages,
            mask=batch.mask,
            agent_of=batch.agent_of,
            num_agents=self._num_agents,
            old_logprobs=old.logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            reference_logprobs=old.reference_logprobs,
            weights=batch.weights,
        )


def _only_of(agent: int, batch: PackedBatch) -> PackedBatch:
    """The batch with every term of other agents' tokens 0."""
    weights = torch.ones_like(batch.advantages) if batch.weights is None else batch.weights
    return dataclasses.replace(batch, weights=weights * (batch.agent_of == agent))


def _clipped(objective: PolicyObjective, clip: Clip) -> PolicyObjective:
    """The objective with the clip range of a micro-batch's agents, where they have their own."""
    low, high = clip
    if low is None and high is None:
        return objective
    return dataclasses.replace(
        objective,
        clip_low=objective.clip_low if low is None else low,
        clip_high=objective.clip_high if high is None else high,
    )


def _lacks_experts(batch: PackedBatch) -> bool:
    return batch.routed_experts is None and batch.trained_rows.numel() > 0
