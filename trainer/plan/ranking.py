"""All layouts and recompute modes that could train a policy: which fit, how long a step takes, why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.learner.megatron.layout import Layout, fitting
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.memory import RankMemory, Recompute, Training, most_loaded_rank
from marsrl.trainer.plan.speed import StepTime, Work, step_time

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full", "full_offload")


@dataclass(frozen=True)
class Job:
    """What is to be trained: `training` in any layout and recompute mode.

    shared_bytes: on the same GPU beside this policy's training (an engine in the same process). scored: the models that run
    forward once before the update. cuts_sequences: context parallelism is possible.
    """

    training: Training
    work: Work
    sweeps_entropy: bool
    shared_bytes: float
    scored: tuple[ModelShape, ...] = ()
    cuts_sequences: bool = True


@dataclass(frozen=True)
class Option:
    """One way to train. needed: bytes of the fullest GPU, with what the process and fragmentation take."""

    layout: Layout
    recompute: Recompute
    memory: RankMemory
    needed: float
    fits: bool
    time: StepTime

    @property
    def why_not(self) -> str:
        """The largest part of what does not fit, with its remedy."""
        memory, fewer = self.memory, "more tensor, expert or pipeline ranks"
        shorter = "tensor or context ranks, or shorter sequences"
        parts = {
            "optimizer state": (memory.optimizer, "more ranks, or optimizer.offload"),
            "gradients": (memory.gradients, fewer),
            "weights": (memory.weights, fewer),
            "the reference's weights": (memory.reference, f"{fewer}, or loss.kl=none"),
            "activations": (memory.activations, f"recompute, {shorter}"),
            "the experts to replay": (memory.replay, "more data ranks, or trainer.router_replay=recompute"),
            f"working memory of the {memory.moment}": (memory.working, shorter),
        }
        name, (size, remedy) = max(parts.items(), key=lambda part: part[1][0])
        return f"{name} {size / 2**30:.1f} GiB: {remedy}"


def options(job: Job, gpu: hw.Gpu) -> list[Option]:
    """Every layout that is valid, in every recompute mode; the fastest that fits first, then what comes closest."""
    layouts = [
        each for each in fitting(job.training.shape, job.training.world_size) if each.context == 1 or job.cuts_sequences
    ]
    found = [option(job, layout, recompute, gpu) for layout in layouts for recompute in RECOMPUTE]
    return sorted(found, key=lambda o: (not o.fits, o.time.total if o.fits else o.needed, o.layout.words))


def option(job: Job, layout: Layout, recompute: Recompute, gpu: hw.Gpu) -> Option:
    """Memory and time of one layout.

    needed = peak (1 + fragmentation) + CUDA context, NCCL, cuBLAS + what else lives on this GPU
    """
    training = job.training
    replicas = layout.data(training.world_size)
    setup = replace(
        training,
        layout=layout,
        recompute=recompute,
        num_micro_batches=max(1, round(job.work.tokens / replicas / training.tokens)),
        expert_imbalance=hw.IMBALANCE.value if training.shape.num_experts and layout.expert > 1 else 1.0,
    )
    memory = most_loaded_rank(setup)
    needed = memory.peak * (1 + hw.FRAGMENTATION.value) + hw.PROCESS_BYTES.value + job.shared_bytes
    time = step_time(setup, job.work, gpu, job.sweeps_entropy, job.scored)
    return Option(layout, recompute, memory, needed, needed <= gpu.memory_bytes, time)


def best_of_each_layout(found: Sequence[Option]) -> list[Option]:
    """The first option of every layout, in the order of `found`: a layout is listed once."""
    first: dict[Layout, Option] = {}
    for each in found:
        first.setdefault(each.layout, each)
    return list(first.values())
