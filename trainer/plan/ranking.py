"""All layouts and recompute modes that could train a policy: which fit, how long a step takes, why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.learner.megatron.layout import Layout, fitting
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.memory import RankMemory, Recompute, RouterReplay, Training, most_loaded_rank
from marsrl.trainer.plan.speed import StepTime, Work, step_time

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full", "full_offload")


@dataclass(frozen=True)
class Job:
    """What is to be trained, whatever the layout. tokens: of the largest micro-batch.

    shared_bytes: on the same GPU beside this policy's training (an engine in the same process). reference: of a KL term.
    scored: the models that run forward once before the update. cuts_sequences: context parallelism is possible.
    deterministic: attention's backward repeats bitwise.
    """

    shape: ModelShape
    dtype: Literal["float32", "bfloat16"]
    world_size: int
    tokens: int
    work: Work
    offloads_optimizer: bool
    sweeps_entropy: bool
    shared_bytes: float
    distributes_optimizer: bool = True
    reference: ModelShape | None = None
    scored: tuple[ModelShape, ...] = ()
    cuts_sequences: bool = True
    deterministic: bool = False
    router_replay: RouterReplay = "none"


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
        parts = {
            "optimizer state": (self.memory.optimizer, "more ranks, or optimizer.offload"),
            "gradients": (self.memory.gradients, "more tensor, expert or pipeline ranks"),
            "weights": (self.memory.weights, "more tensor, expert or pipeline ranks"),
            "the reference's weights": (
                self.memory.reference,
                "more tensor, expert or pipeline ranks, or loss.kl=none",
            ),
            "activations": (self.memory.activations, "recompute, tensor or context ranks, or shorter sequences"),
            "the experts to replay": (self.memory.replay, "more data ranks, or trainer.router_replay=recompute"),
            f"working memory of the {self.memory.moment}": (
                self.memory.working,
                "tensor or context ranks, or shorter sequences",
            ),
        }
        name, (size, remedy) = max(parts.items(), key=lambda part: part[1][0])
        return f"{name} {size / 2**30:.1f} GiB: {remedy}"


def options(job: Job, gpu: hw.Gpu) -> list[Option]:
    """Every layout that is valid, in every recompute mode; the fastest that fits first, then what comes closest."""
    layouts = [each for each in fitting(job.shape, job.world_size) if each.context == 1 or job.cuts_sequences]
    found = [option(job, layout, recompute, gpu) for layout in layouts for recompute in RECOMPUTE]
    return sorted(found, key=lambda o: (not o.fits, o.time.total if o.fits else o.needed, o.layout.words))


def option(job: Job, layout: Layout, recompute: Recompute, gpu: hw.Gpu) -> Option:
    """Memory and time of one layout.

    needed = peak (1 + fragmentation) + CUDA context, NCCL, cuBLAS + what else lives on this GPU
    """
    replicas = layout.data(job.world_size)
    setup = Training(
        shape=job.shape,
        layout=layout,
        world_size=job.world_size,
        dtype=job.dtype,
        recompute=recompute,
        tokens=job.tokens,
        num_micro_batches=max(1, round(job.work.tokens / replicas / job.tokens)),
        head_rows=int(hw.HEAD_ROWS.value),
        offloads_optimizer=job.offloads_optimizer,
        distributes_optimizer=job.distributes_optimizer,
        reference=job.reference,
        deterministic=job.deterministic,
        router_replay=job.router_replay,
        expert_imbalance=hw.IMBALANCE.value if job.shape.num_experts and layout.expert > 1 else 1.0,
    )
    memory = most_loaded_rank(setup)
    needed = memory.peak * (1 + hw.FRAGMENTATION.value) + hw.PROCESS_BYTES.value + job.shared_bytes
    time = step_time(setup, job.work, gpu, job.sweeps_entropy, job.scored)
    return Option(layout, recompute, memory, needed, needed <= gpu.memory_bytes, time)


def best_of_each_layout(found: Sequence[Option]) -> list[Option]:
    """The first option of every layout, in the order of `found`: a layout is listed once."""
    seen: set[Layout] = set()
    out = []
    for each in found:
        if each.layout not in seen:
            seen.add(each.layout)
            out.append(each)
    return out
