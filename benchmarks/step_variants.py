"""Programs that benchmarks/train_step.py compares: ours, plain Megatron and the reference loop.

Ours and Megatron support any parallel layout, and use the same layers on the same packed micro-batches. They differ only in the
head: ours is fused, Megatron's computes full logits and a vocabulary-parallel cross entropy. Megatron's entropy would need full
logits twice, so DMMPT is compared only with the reference.

With one adapter per agent, ours puts the samples of all agents into the same micro-batches. The reference is PEFT's loop, and
WHOLE is our step that trains all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from step_problem import NUM_AGENTS, StepProblem

from marsrl.rollout.adapter import AdapterConfig
from marsrl.trainer.data.packing import TrainSequence

OURS, MEGATRON = "ours", "plain Megatron, packed and dropped"
REFERENCE, SORTED = "reference", "reference, sorted and dropped"
VARIANTS = (OURS, MEGATRON, REFERENCE, SORTED)
WHOLE = "ours, all weights"
ADAPTER_VARIANTS = (OURS, WHOLE, REFERENCE, SORTED)


@dataclass(frozen=True)
class Variant:
    """Program to compare. step(): trains once, returns the gradient norm (over all adapters). trained: its trained sequences."""

    step: Callable[[], float]
    close: Callable[[], None]
    trained: list[TrainSequence]


def build(
    name: str,
    model_dir: str,
    problem: StepProblem,
    sequences: Sequence[TrainSequence],
    *,
    layout: dict[str, int],
    mpt: float | None,
    adapters: Sequence[AdapterConfig] = (),
    recompute: str = "none",
) -> Variant:
    """Build one of VARIANTS or ADAPTER_VARIANTS.

    layout: the learner's layout. mpt: entropy threshold of DMMPT, nats. adapters: one per agent. recompute:
    policies.<name>.recompute.
    """
    if name in (REFERENCE, SORTED):
        from reference_loop import ReferenceLoop, ReferenceOptions  # imports transformers, which takes seconds

        options = ReferenceOptions(
            micro_batch=problem.reference_rows,
            is_sorted=name == SORTED,
            mpt_entropy=mpt,
            dtype=problem.dtype,
            adapters=tuple(adapter.start or "" for adapter in adapters),
        )
        loop = ReferenceLoop(model_dir, options)
        chosen = [s for s in sequences if s.advantage != 0 or name != SORTED]
        return Variant(lambda: loop.step(sequences), lambda: None, chosen)
    trained = adapters if name == OURS and adapters else [None]
    return _learner(model_dir, problem, sequences, layout, mpt, trained, recompute, has_fused_head=name != MEGATRON)


def _learner(
    model_dir: str,
    problem: StepProblem,
    sequences: Sequence[TrainSequence],
    layout: dict[str, int],
    mpt: float | None,
    adapters: Sequence[AdapterConfig | None],
    recompute: str,
    *,
    has_fused_head: bool,
) -> Variant:
    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import MptConfig, PolicyConfig
    from marsrl.trainer.data.scatter import MiniBatch, Update, joined, micro_batches
    from marsrl.trainer.learner.learner import Learner, groups
    from marsrl.trainer.learner.megatron import parallel

    policy = PolicyConfig.model_validate(
        {"dtype": problem.dtype, "optimizer": {"lr": 1e-5}, "layout": layout, "recompute": recompute}
    )
    learners: dict[str, Learner] = {}
    for index, adapter in enumerate(adapters):
        learners[f"{index}"] = Learner(
            policy.model_copy(update={"adapter": adapter}),
            model_dir,
            objectives=[PolicyObjective()] * NUM_AGENTS,
            mpt=MptConfig(scope="sample" if mpt is not None else "off", entropy=mpt or 0.2),
            total_steps=100,
            seed=0,
            base=learners["0"].base if learners else None,
        )
    if not has_fused_head:
        _take_megatrons_head(learners["0"])
    policy_of = [f"{agent % len(adapters)}" for agent in range(NUM_AGENTS)]
    (group,) = groups(learners, policy_of)
    trained = [s for s in sequences if s.advantage != 0]

    def step() -> float:
        parts = []
        for name in learners:
            num_tokens = sum(s.num_sampled for s in sequences if policy_of[s.agent] == name)
            policy_sequences = tuple(s for s in trained if policy_of[s.agent] == name)
            parts.append((MiniBatch(policy_sequences, float(num_tokens)),))
        shard = group.shard(problem.micro_batch_tokens)
        updates = [
            Update(tuple(micro_batches(mini_batch.sequences, shard)), mini_batch.normaliser)
            for mini_batch in joined(parts)
        ]
        return math.hypot(*(stats.grad_norm for stats in group.train_step(updates).values()))

    return Variant(step, parallel.stop, trained)


def _take_megatrons_head(learner: Any) -> None:
    """Replace the learner's fused head by logits and megatron's cross entropy."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    from marsrl.kernels import PolicyLoss
    from marsrl.kernels.head.objective import METRICS
    from marsrl.trainer.learner.megatron.head import HeadResult, PolicyModel

    class PlainHead(PolicyModel):
        def _loss(self, batch: Any, loss: Any, mpt: Any, hidden: torch.Tensor, weight: torch.Tensor) -> HeadResult:
            logits = torch.nn.functional.linear(hidden, weight).float()  # [T, V / TP]
            nll = vocab_parallel_cross_entropy(logits[:, None], batch.targets[:, None])
            lengths = batch.cu_seqlens.diff().long()
            advantage = batch.advantages.repeat_interleave(lengths, output_size=batch.num_tokens)
            # At ratio 1, ratio and log-prob have the same gradient.
            terms = nll[:, 0] * advantage * batch.mask
            agents = batch.agent_of.long().repeat_interleave(lengths, output_size=batch.num_tokens)
            of_agent = terms.new_zeros(NUM_AGENTS).index_add_(0, agents, terms.detach())
            zeros = torch.zeros_like(of_agent)
            sums = {**dict.fromkeys(METRICS, zeros), "loss": of_agent}
            logprobs = torch.where(batch.mask, -nll[:, 0].detach(), 0.0)
            total = terms.sum() / loss.normaliser
            return HeadResult(PolicyLoss(total, logprobs, logprobs, logprobs, sums), None, loss)

    learner.model.__class__ = PlainHead
