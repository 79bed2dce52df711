"""Learner of one policy: packed micro-batches of a step in, new weights and statistics out. Same code on CPU and GPUs.

    learner = Learner(policy, "models/qwen3", objectives=[PolicyObjective()] * 5, mpt=MptConfig(), total_steps=32, seed=0)
    stats = learner.train_step([Update(micro_batches, normaliser=float(num_tokens))])    # all ranks
    for name, tensor in learner.held().export(): ...                                     # all ranks; tensors on rank 0

The parts of a step and their files:

    train_step      for each update: prepare, with the step's starting weights       megatron/passes.py
                        check that ranks' micro-batches match; this rank's part      megatron/context.py
                        old and reference log-probs, experts to force                megatron/router_replay.py
                    for each update:                                                 Together
                        forward and backward of each micro-batch                     megatron/passes.py
                            the model, its head, gate and loss                       megatron/head.py
                            the adapters' part of its layers                         megatron/adapter.py
                            the router's balancing loss                              megatron/balance.py
                        its statistics over all ranks                                step_stats.py
                        the optimizer step                                           megatron/optimizer.py
    sleep, wake: memory that engines use while they decode                           sleep.py

Policies that are adapters of one base share micro-batches; each gets the same update as if trained alone:

    for group in groups(learners, agents):            # such as Together((solver, verifier), ...), Together((other,), ...)
        updates = scatter(joined(...), group.shard(max_tokens))
        stats = group.train_step(updates)              # {policy: StepStats}

The old policy of all updates is the policy before the first one, so ratio and clipping have an effect from the second update
on. A step has one learning rate and one policy version.

No random numbers are drawn after construction (no dropout), so a checkpoint holds only weights, optimizer and step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.config import MptConfig, PolicyConfig, SharedPrefixes
from marsrl.trainer.config.policy import why_not_adapter
from marsrl.trainer.data.packing import PackedBatch
from marsrl.trainer.data.scatter import BatchShard, Update
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.megatron.hf_files import copy_frame, weights_sum
from marsrl.trainer.learner.megatron.layout import Layout, check, resolve
from marsrl.trainer.learner.other_roundings import Precision, other_roundings
from marsrl.trainer.learner.sleep import Memory
from marsrl.trainer.learner.step_stats import StepStats, empty_update, summed, update_stats
from marsrl.trainer.machine import training_device
from marsrl.trainer.runs.directory import write_json

if TYPE_CHECKING:  # megatron is imported when a Learner is built, after the CPU shim is installed.
    from marsrl.trainer.learner.megatron.adapter import Adapter, FrozenBase
    from marsrl.trainer.learner.megatron.checkpoint_store import PendingSave
    from marsrl.trainer.learner.megatron.convert import Converter
    from marsrl.trainer.learner.megatron.optimizer import AdapterOptimizer, Optimizer
    from marsrl.trainer.learner.megatron.passes import Model, Passes, Work


class Learner:
    """One policy's model and optimizer on this rank. Every method is collective: all ranks call it together."""

    def __init__(
        self,
        policy: PolicyConfig,
        model_dir: str | Path,
        *,
        objectives: Sequence[PolicyObjective],
        mpt: MptConfig,
        total_steps: int,
        seed: int,
        old_policy: Literal["pois", "sais", "recompute"] = "pois",
        router_replay: Literal["none", "recompute", "rollout"] = "none",
        reference_dir: str | Path | None = None,
        reward_kl_coef: float = 0.0,
        base: FrozenBase | None = None,
        sleeps: bool = False,
    ) -> None:
        """Build the model on the layout's process groups (created if there are none) and read its weights.

        With policy.adapter the weights are frozen and an adapter is trained.

        objectives: objective of each agent of the run, in order; they differ only in clip ranges. mpt.probability replaces
            their mpt_probability; mpt.scope "off" turns the masking off.
        reference_dir: weights of the frozen KL reference; loaded only if there is a KL term. None: the
            reference is the adapter's starting point on the base, which is loaded anyway.
        reward_kl_coef: weight of the KL penalty in the reward, instead of the objectives' kl_coef (kl_reward.py).
        base: another learner's frozen base to share, instead of loading model_dir again.
        sleeps: True: sleep() frees the GPU's memory (trainer.sleep); False: it does nothing.

        Raises ValueError, before anything is started, if the directory or the layout cannot be used.
        """
        shape = read_shape(model_dir)
        layout = resolve(policy.layout)
        check(layout, shape, parallel.world_size())
        if policy.adapter is not None and (reason := why_not_adapter(policy.adapter, shape, policy.layout)) is not None:
            raise ValueError(reason)
        parallel.start(layout, seed)
        from marsrl.trainer.learner.megatron.model import frozen_model
        from marsrl.trainer.learner.megatron.passes import Model, Passes

        probability = None if mpt.scope == "off" else mpt.probability
        self._objectives = tuple(
            dataclasses.replace(objective, mpt_probability=probability) for objective in objectives
        )
        self._optimizer_config, self._total_steps, self._model_dir = policy.optimizer, total_steps, Path(model_dir)
        self._shape, self.base = shape, base  # `base` is the frozen base of an adapter.
        self.adapter: Adapter | None = None
        self.vocab_size = shape.vocab_size  # Size without padding.
        self.align = layout.tensor  # Packed lengths in tokens are multiples of this.
        reference: Model | None = None
        if policy.adapter is None:
            trained = self._start_whole(policy, layout)
        else:
            trained = self._start_adapter(policy, layout, seed)
        if objectives[0].kl != "none" and reference_dir is not None:
            reference = Model(frozen_model(reference_dir, layout, policy))
        elif objectives[0].kl != "none" and policy.adapter is not None:
            reference = self._starting_point(policy, seed)
        self._past: Any = None  # Module of a reference that is renewed from later weights.
        if policy.reference == "past" and reference is not None:
            self._past = reference.bank.adapters[reference.slots[0]] if reference.bank else reference.module
        self.passes = Passes(
            self.model,
            trained,
            reference,
            layout,
            policy.router_aux_loss if shape.num_experts else 0.0,
            self._objectives,
            mpt,
            old_policy,
            router_replay,
            reward_kl_coef,
        )
        self.num_steps = 0  # Includes skipped and empty steps, as the schedule does.
        self.sleeps = sleeps
        self._memories = tuple(self._parts_of_memory())
        self._converter.held = self._memories[0].held

    def _start_whole(self, policy: PolicyConfig, layout: Layout) -> Model:
        """Set up training of all weights."""
        from marsrl.trainer.learner.megatron.convert import Converter
        from marsrl.trainer.learner.megatron.model import build_model
        from marsrl.trainer.learner.megatron.optimizer import Optimizer
        from marsrl.trainer.learner.megatron.passes import Model

        self.model, ddp = build_model(self._shape, layout, policy)
        self.optimizer: Optimizer | AdapterOptimizer = Optimizer(ddp, policy.optimizer)
        self._converter = Converter(self.model, self._shape)
        self.read_weights(self._model_dir)
        return Model(ddp)

    def _start_adapter(self, policy: PolicyConfig, layout: Layout, seed: int) -> Model:
        """Set up training of an adapter."""
        from marsrl.trainer.learner.megatron.adapter import Adapter, FrozenBase
        from marsrl.trainer.learner.megatron.optimizer import AdapterOptimizer
        from marsrl.trainer.learner.megatron.passes import Model

        assert policy.adapter is not None
        base = self.base = self.base or FrozenBase(self._model_dir, layout, policy)
        self.model, self.adapter = base.model, Adapter(base, policy.adapter, seed)
        slot = base.trained.add(self.adapter)
        base.optimizer_configs.append(policy.optimizer)
        base.model.config.finalize_model_grads_func = lambda *chunks, **options: base.optimizer.finalize()
        self.optimizer = AdapterOptimizer(base, slot)
        self._converter = self.adapter.converter
        return Model(base.wrapped, base.trained, (slot,))

    def _starting_point(self, policy: PolicyConfig, seed: int) -> Model:
        """Return a model with the adapter's initial weights; the bare base if these have no effect."""
        from marsrl.trainer.learner.megatron.adapter import Adapter
        from marsrl.trainer.learner.megatron.passes import Model

        assert policy.adapter is not None and self.base is not None
        if policy.adapter.start is None and policy.reference != "past":
            return Model(self.base.wrapped)
        slot = self.base.references.add(Adapter(self.base, policy.adapter, seed))
        return Model(self.base.wrapped, self.base.references, (slot,))

    def _parts_of_memory(self) -> Iterator[Memory]:
        """Yield the memory of the weights (of an adapter: its base with all adapters), and of the reference if it is a model."""
        reference, base = self.passes.reference, self.base
        is_model = reference is not None and (base is None or reference.module is not base.wrapped)
        of_reference = reference.module.parameters if reference is not None and is_model else tuple
        if base is None:
            optimizer = cast("Optimizer", self.optimizer)
            yield Memory(
                lambda: (*self.model.parameters(), *optimizer.state_tensors(), *of_reference()),
                optimizer.gradient_tensors,
            )
            return
        yield base.memory
        if is_model:
            yield Memory(of_reference)

    def sleep(self) -> None:
        """With `sleeps`, move weights, optimizer state and reference to pinned CPU memory and free the gradients. Collective.

        While the learner sleeps, held() exports from the CPU. Every other method first wakes the learner; engines on its GPU must
        then sleep. Ranks may return at different times: call a barrier before the engines wake.
        """
        if self.sleeps:
            if not self._memories[0].is_asleep:
                self.optimizer.gather_weights()
            for memory in self._memories:
                memory.sleep()

    def wake(self) -> None:
        """Restore what sleep() moved; a no-op while awake."""
        for memory in self._memories:
            memory.wake()

    def shard(self, max_tokens: int, shared_prefixes: SharedPrefixes = "off") -> BatchShard:
        """Return this rank's share of a batch, in micro-batches of at most max_tokens computed tokens."""
        from megatron.core import parallel_state

        return BatchShard(
            data_rank=int(parallel_state.get_data_parallel_rank()),
            data_size=int(parallel_state.get_data_parallel_world_size()),
            max_tokens=max_tokens,
            align=self.align,
            routes=parallel.routes(),
            objectives=self._objectives,
            shared_prefixes=shared_prefixes,
        )

    def train_step(
        self,
        updates: Sequence[Update],
        *,
        lr: float | None = None,
        by_agent: bool = False,
        keep: Collection[str] = (),
    ) -> StepStats:
        """Train one step: each update takes an optimizer step.

        The loss of an update is the sum of all ranks' token losses, divided by its normaliser.

        lr: overrides the policy's schedule for this step.
        by_agent: also measure the norm of each agent's share of the gradient; this does not change the step.
        keep: uids of samples whose tokens are added to the statistics; the same on all ranks.

        All ranks of a data-parallel group must have equally many micro-batches; a rank without samples has pack([]). An update
        whose loss or gradient is not finite on any rank changes nothing.

        Raises ValueError on all ranks if any micro-batch does not fit mpt.scope or trainer.router_replay.
        """
        alone = Together({"": self}, (None,), self.passes)
        return alone.train_step(updates, lr=lr, by_agent=by_agent, keep=keep)[""]

    def next_lr(self) -> float:
        """Count one more step and return its scheduled learning rate."""
        self.num_steps += 1
        return self._optimizer_config.lr_at(self.num_steps - 1, self._total_steps)

    @torch.no_grad()
    def score(
        self,
        batches: Sequence[PackedBatch],
        *,
        rounded_as: Precision | None = None,
    ) -> list[Tensor]:
        """Return log-probs of each batch under the current weights, [T] float32 on the CPU, nats; 0 outside its mask.

        The router chooses the experts, regardless of trainer.router_replay.
        rounded_as: perturb every intermediate result by the roundings of another program (other_roundings.py).
        """
        self.wake()
        with nullcontext() if rounded_as is None else other_roundings(self.model, rounded_as):
            return self.passes.score(batches)

    def read_weights(self, folder: str | Path) -> None:
        """Load weights from a Hugging Face directory, or an adapter from a PEFT directory; the optimizer keeps its moments.

        Raises ValueError, with name, file and both shapes, if a tensor is missing or has a wrong shape.
        """
        if self.adapter is None:
            self._converter.load(folder)
        else:
            self.adapter.read(folder)
        self.optimizer.reload_weights()

    def allocate(self) -> None:
        """Allocate the buffers and the optimizer that the adapters of a base share; a no-op if the policy trains all weights.

        Call it after the last adapter is added, and before engines take the memory. Otherwise the first use allocates them.
        """
        if self.base is not None:
            self.base.references.join()
            _ = self.optimizer.joint

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Copy the current weights (or the adapter) into the reference, which must be `past`."""
        self.wake()
        self.optimizer.gather_weights()
        trained = self.adapter or self.model
        for reference, current in zip(self._past.parameters(), trained.parameters(), strict=True):
            reference.copy_(current)

    def held(self) -> Converter:
        """Return the exporter of the current weights (or the adapter's), without copying."""
        if not self._memories[0].is_asleep:  # Otherwise sleep() has gathered them.
            self.optimizer.gather_weights()
        return self._converter

    @property
    def has_experts(self) -> bool:
        return self.adapter is not None and "experts" in self.adapter.settings.targets

    def begin_save(self, folder: Path, *, copy: bool) -> PendingSave:
        """Plan a save of weights (or only the adapter), optimizer and step into `folder`, a Megatron distributed checkpoint.

        Nothing is written yet.

        copy: copy the state first, so that the rest of the save may overlap training.
        """
        from marsrl.trainer.learner.megatron.checkpoint_store import begin_save, policy_state

        self.wake()
        self.optimizer.gather_weights()
        about: dict[str, Any] = {"num_steps": self.num_steps}
        if self.adapter is not None:
            base = {"path": str(self._model_dir.resolve()), "sum": weights_sum(self._model_dir)}
            about |= {"adapter": self.adapter.settings.model_dump(mode="json"), "base": base}

        def write_files(folder: Path) -> None:
            copy_frame(self._model_dir, folder / "hf")  # `marsrl export` needs these files.
            write_json(folder / "learner.json", about)

        state = policy_state(self.adapter or self.model, self.optimizer, self._past, is_loading=False)
        return begin_save(state, folder, write_files, copy=copy)

    def load(self, folder: str | Path) -> None:
        """Restore a save; under the same layout training continues bit for bit.

        Raises ValueError if the checkpoint is incomplete (naming the missing file), or its adapter belongs to another base.
        """
        from marsrl.trainer.learner.megatron.checkpoint_store import load, policy_state

        folder = Path(folder)
        if not (folder / "learner.json").is_file():
            raise ValueError(f"learner: {folder} is not a complete checkpoint: learner.json is missing")
        about = json.loads((folder / "learner.json").read_text(encoding="utf-8"))
        if (self.adapter is None) != ("adapter" not in about):
            raise ValueError(
                f"learner: {folder} holds {'an adapter' if 'adapter' in about else 'whole weights'}, but this policy trains "
                f"{'whole weights' if 'adapter' in about else 'an adapter'}; resume with the run's own policies"
            )
        if self.adapter is not None and about["base"]["sum"] != weights_sum(self._model_dir):
            raise ValueError(
                f"learner: {folder} is an adapter of the weights in {about['base']['path']}, but those in "
                f"{self._model_dir} differ; set model to its base"
            )
        self.wake()
        trained = self.adapter or self.model
        state = load(policy_state(trained, self.optimizer, self._past, is_loading=True), folder)
        modules = {"model": trained} if self._past is None else {"model": trained, "reference": self._past}
        for part, module in modules.items():
            missing, unknown = module.load_state_dict(state[part], strict=False)
            missing = [name for name in missing if not name.endswith("_extra_state")]
            if missing or unknown:
                raise ValueError(f"learner: {folder} does not match the {part}: missing {missing}, unknown {unknown}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = int(about["num_steps"])
        if self.base is None:
            self.sleep()  # Leave the memory to the next policy. Adapters share the memory of their base.


@dataclass(frozen=True)
class Together:
    """Policies that share micro-batches, by name.

    agents: each policy's agents, as indices into the run's agents; None: all.
    adapters: for each of the run's agents, index of its policy in `learners`; (): a single policy.
    """

    learners: Mapping[str, Learner]
    agents: tuple[frozenset[int] | None, ...]
    passes: Passes
    adapters: tuple[int, ...] = ()

    def shard(self, max_tokens: int, shared_prefixes: SharedPrefixes = "off") -> BatchShard:
        """Return this rank's share of the policies' batch, as Learner.shard."""
        first = next(iter(self.learners.values()))
        return dataclasses.replace(
            first.shard(max_tokens, shared_prefixes), adapters=self.adapters, is_apart=self.is_apart
        )

    @property
    def is_apart(self) -> bool:
        """True if each micro-batch must have samples of a single policy, as experts' adapters need."""
        return len(self.learners) > 1 and any(learner.has_experts for learner in self.learners.values())

    @torch.no_grad()
    def score(self, batch: PackedBatch, *, rounded_as: Precision | None = None) -> Tensor:
        """Return log-probs of a batch as Learner.score, each sequence under its own policy. Collective.

        The sequences' `agent` is the index of a policy of this group, in ascending order; with is_apart, all have the same one.
        """
        for learner in self.learners.values():
            learner.wake()
        trained = dataclasses.replace(self.passes.trained, adapter_of=tuple(range(len(self.learners))))
        model = next(iter(self.learners.values())).model
        with nullcontext() if rounded_as is None else other_roundings(model, rounded_as):
            return dataclasses.replace(self.passes, trained=trained).score([batch])[0]

    def train_step(
        self,
        updates: Sequence[Update],
        *,
        lr: float | None = None,
        by_agent: bool = False,
        keep: Collection[str] = (),
    ) -> dict[str, StepStats]:
        """Run Learner.train_step for each policy. Collective.

        Each policy has its own norm, clipping, learning rate and step count. An update without tokens of a policy leaves that
        policy unchanged.
        """
        learners = list(self.learners.values())
        for learner in learners:
            learner.wake()
        scheduled = [learner.next_lr() for learner in learners]
        rates = scheduled if lr is None else [lr] * len(learners)
        works = [self.passes.prepare(update, is_first=i == 0) for i, update in enumerate(updates)]
        stats: list[list[StepStats]] = [[] for _ in learners]
        optimizer, slots = learners[0].optimizer.joint, [learner.optimizer.slot for learner in learners]
        for work in works:
            if not work.micro_batches:
                for updates_of, rate in zip(stats, rates, strict=True):
                    updates_of.append(empty_update(work.num_agents, rate))
                continue
            norms = self._agent_grad_norms(work) if by_agent else [()] * len(learners)
            optimizer.zero_grad()
            results, replay, load = self.passes.forward_backward(work)
            grad_norms = optimizer.grad_norms()
            own_updates = update_stats(
                work,
                results,
                grad_norms=[grad_norms[slot] for slot in slots],
                rates=rates,
                replay=replay,
                load=load,
                agent_grad_norms=norms,
                keep=frozenset(keep),
                agents=self.agents,
            )
            updated = {slot: update.lr for slot, update in zip(slots, own_updates, strict=True) if update.is_updated}
            if updated:
                optimizer.apply(grad_norms, [updated.get(slot) for slot in range(len(grad_norms))])
            for updates_of, update in zip(stats, own_updates, strict=True):
                updates_of.append(update)
        return {name: summed(updates_of) for name, updates_of in zip(self.learners, stats, strict=True)}

    def _agent_grad_norms(self, work: Work) -> list[tuple[float | None, ...]]:
        """Return each policy's gradient norms by agent, over all ranks, from a forward and backward pass per agent.

        The norm is None for an agent without a trained token, and for an agent of another policy.

        The gradient buffers then hold the last agent's gradients.
        """
        counts = torch.zeros(work.num_agents, dtype=torch.int64, device=training_device())
        for micro_batch in work.micro_batches:
            batch = micro_batch.cut.batch
            counts += batch.of_tokens(batch.agent_of)[batch.trained_rows].bincount(minlength=work.num_agents)
        dist.all_reduce(counts)
        norms: list[list[float | None]] = [[None] * work.num_agents for _ in self.learners]
        optimizer = next(iter(self.learners.values())).optimizer.joint
        for agent in counts.nonzero()[:, 0].tolist():
            optimizer.zero_grad()
            self.passes.forward_backward(work, agent)
            grad_norms = optimizer.grad_norms()
            for learner, agents, agent_norms in zip(self.learners.values(), self.agents, norms, strict=True):
                if agents is None or agent in agents:
                    agent_norms[agent] = grad_norms[learner.optimizer.slot]
        return [tuple(agent_norms) for agent_norms in norms]


def groups(learners: Mapping[str, Learner], policy_of: Sequence[str]) -> list[Together]:
    """Group the policies that train together, in order. policy_of: the policy of each agent of the run."""
    by_base: list[dict[str, Learner]] = []
    for name, learner in learners.items():
        joinable = (group for group in by_base if next(iter(group.values())).passes.can_join(learner.passes))
        group = next(joinable, None)
        if group is None:
            by_base.append({name: learner})
        else:
            group[name] = learner
    return [_together(group, policy_of) for group in by_base]


def _together(group: dict[str, Learner], policy_of: Sequence[str]) -> Together:
    names, (first, *others) = list(group), group.values()
    if not others:
        return Together(group, (None,), first.passes)
    agents = tuple(frozenset(i for i, policy in enumerate(policy_of) if policy == name) for name in names)
    places = tuple(names.index(policy) if policy in names else 0 for policy in policy_of)
    return Together(group, agents, first.passes.joined([learner.passes for learner in others], places), places)
