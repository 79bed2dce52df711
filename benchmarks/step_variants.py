"""The programs that benchmarks/train_step.py compares: ours, plain Megatron, the reference loop; one optimizer step each.

Ours and Megatron support any parallel layout and use the same layers on the same packed micro-batches, so they differ only in the
head: fused, or logits with Megatron's vocabulary-parallel cross entropy. Megatron's entropy would need full logits twice, so
DMMPT is compared only with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference_loop import ReferenceLoop, ReferenceOptions
from step_problem import StepProblem

from marsrl.trainer.data.packing import TrainSequence

OURS, MEGATRON = "ours", "plain Megatron, packed and dropped"
REFERENCE, SORTED = "reference", "reference, sorted and dropped"
VARIANTS = (OURS, MEGATRON, REFERENCE, SORTED)


@dataclass(frozen=True)
class Variant:
    """step() trains once and returns the gradient norm; trained: the sequences in its forward pass."""

    step: Callable[[], float]
    close: Callable[[], None]
    trained: list[TrainSequence]


def build(
    name: str,
    model_dir: str,
    problem: StepProblem,
    sequences: Sequence[TrainSequence],
    num_tokens: int,
    *,
    layout: dict[str, int],
    experts: str,
    mpt: float | None,
) -> Variant:
    """One of VARIANTS. layout: of the learner's; experts: transformers' implementation; mpt: DMMPT's entropy, nats."""
    dropped = [s for s in sequences if s.advantage != 0]
    if name in (REFERENCE, SORTED):
        options = ReferenceOptions(
            micro_batch=problem.reference_rows,
            is_sorted=name == SORTED,
            experts=experts,
            mpt_entropy=mpt,
            dtype=problem.dtype,
        )
        loop = ReferenceLoop(model_dir, options)
        chosen = dropped if name == SORTED else list(sequences)
        return Variant(lambda: loop.step(sequences, num_tokens)[1], lambda: None, chosen)
    return _learner(model_dir, problem, dropped, num_tokens, layout, mpt, has_fused_head=name == OURS)


def _learner(
    model_dir: str,
    problem: StepProblem,
    trained: list[TrainSequence],
    num_tokens: int,
    layout: dict[str, int],
    mpt: float | None,
    *,
    has_fused_head: bool,
) -> Variant:
    from marsrl.kernels import PolicyObjective
    from marsrl.trainer.config import LayoutConfig, MptConfig, OptimizerConfig, PolicyConfig
    from marsrl.trainer.data.scatter import Update, micro_batches
    from marsrl.trainer.learner.learner import Learner
    from marsrl.trainer.learner.megatron import parallel

    policy = PolicyConfig(
        dtype=problem.dtype, optimizer=OptimizerConfig(lr=1e-5), layout=LayoutConfig.model_validate(layout)
    )
    learner = Learner(
        policy,
        model_dir,
        objectives=[PolicyObjective()],
        mpt=MptConfig(scope="sample" if mpt is not None else "off", entropy=mpt or 0.2),
        total_steps=100,
        seed=0,
    )
    if not has_fused_head:
        _take_megatrons_head(learner)

    def step() -> float:
        batches = micro_batches(trained, learner.shard(problem.micro_batch_tokens))
        return learner.train_step([Update(tuple(batches), float(num_tokens))]).grad_norm

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
            # The gradient of the ratio at 1 is that of the log-prob.
            terms = nll[:, 0] * advantage * batch.mask
            of_agent = terms.detach().sum()[None]
            zeros = torch.zeros_like(of_agent)
            sums = {**dict.fromkeys(METRICS, zeros), "loss": of_agent}
            logprobs = torch.where(batch.mask, -nll[:, 0].detach(), 0.0)
            total = terms.sum() / loss.normaliser
            return HeadResult(PolicyLoss(total, logprobs, logprobs, logprobs, sums), None, loss)

    learner.model.__class__ = PlainHead
