"""Ranking of a policy's layouts and recompute modes by memory and step time; ranking of other splits of the GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.engines import Demand, EngineSetup, engine_memory, rollout_time, sync_time, transfer_bytes
from marsrl.commands.plan.memory import RankMemory, Recompute, Training, most_loaded_rank
from marsrl.commands.plan.speed import StepTime, Work, step_time
from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.refusals import why_not_cut
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import SyncBackend
from marsrl.trainer.learner.megatron.layout import Layout, fitting

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full_but_attention", "full", "full_offload")
_TENSOR_PARALLEL = (1, 2, 4, 8)  # an engine stays within one node
_MAX_NUM_SEQS = 256  # vLLM's default. More requests take longer per step, and the cache does not grow.


@dataclass(frozen=True)
class Job:
    """A training job: `training` in any layout and recompute mode.

    shared_bytes: bytes of each GPU in use during updates, besides training: an engine on the same GPU, or NCCL's buffers for
        publishes.
    between_bytes: bytes of each GPU that an engine uses between updates only, because it sleeps during updates.
    sweeps_entropy: True if DMMPT's gate reads the entropy of samples before the loss.
    scored: shapes of models that only run forward, before the updates.
    cuts_sequences: True if context parallelism is possible.
    """

    training: Training
    work: Work
    sweeps_entropy: bool
    shared_bytes: float
    between_bytes: float = 0.0
    scored: tuple[ModelShape, ...] = ()
    cuts_sequences: bool = True


@dataclass(frozen=True)
class Option:
    """One way to train. needed: bytes on the fullest GPU, including process overhead and fragmentation."""

    layout: Layout
    recompute: Recompute
    memory: RankMemory
    needed: float
    fits: bool
    time: StepTime

    @property
    def why_not(self) -> str:
        """Size of the largest part of the memory, with a remedy, for an option that does not fit."""
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
    """Return all valid layouts and recompute modes: first those that fit, fastest first; then those closest to fitting."""
    adapts_experts = any("experts" in adapter.targets for adapter in job.training.adapters)
    layouts = [
        layout
        for layout in fitting(job.training.shape, job.training.world_size)
        if (layout.context == 1 or job.cuts_sequences) and (layout.expert_tensor == 1 or not adapts_experts)
    ]
    found = [option(job, layout, recompute, gpu) for layout in layouts for recompute in RECOMPUTE]
    return sorted(found, key=lambda o: (not o.fits, o.time.total if o.fits else o.needed, o.layout.words))


def option(job: Job, layout: Layout, recompute: Recompute, gpu: hw.Gpu) -> Option:
    """Compute memory and time of one layout.

    needed = CUDA context, NCCL and cuBLAS + the larger of
        during an update: peak (1 + fragmentation) + shared_bytes
        between updates:  memory.static (0 with trainer.sleep) + between_bytes
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
    between = job.between_bytes + (0 if training.sleeps else memory.static)
    most = max(memory.peak * (1 + hw.FRAGMENTATION.value) + job.shared_bytes, between)
    needed = most + hw.PROCESS_BYTES.value
    time = step_time(setup, job.work, gpu, job.sweeps_entropy, job.scored)
    # A publish needs the weights on the GPU, to send them and to compute checksums.
    read_again = 0 if training.adapters or not training.sleeps else memory.weights
    time.offloading += 2 * (memory.asleep + read_again) / (gpu.pcie * hw.LINK_SHARE.value)
    return Option(layout, recompute, memory, needed, needed <= gpu.memory_bytes, time)


def best_of_each_layout(ranked: Sequence[Option]) -> list[Option]:
    """Return the first option of every layout, in the order of `ranked`."""
    first: dict[Layout, Option] = {}
    for candidate in ranked:
        first.setdefault(candidate.layout, candidate)
    return list(first.values())


@dataclass(frozen=True)
class Split:
    """A split into GPUs that train and GPUs that decode. update: the fastest layout that fits on the training GPUs."""

    num_trainers: int
    engines: EngineSetup
    concurrency: float
    rollout_s: float
    update: Option
    step_s: float


def step_seconds(rollouts: Sequence[float], updates: Sequence[float], syncs: Sequence[float], overlap: int) -> float:
    """Return the seconds of one step of all policies, given each policy's seconds.

    Policies decode concurrently, and are updated and published one by one: max(rollouts) + sum(updates) + sum(syncs). With
    rollout.overlap the engines decode while the trainer trains, and only a publish stops both:
    max(max(rollouts), sum(updates)) + sum(syncs).
    """
    rollout, update = max(rollouts), sum(updates)
    return (max(rollout, update) if overlap else rollout + update) + sum(syncs)


def splits(
    job: Job, now: EngineSetup, demand: Demand, backend: SyncBackend, overlap: int, num_gpus: int, gpu: hw.Gpu
) -> list[Split]:
    """Return the fastest split for each engine setup of a single policy, sorted by step time.

    Engine setups vary the GPUs per engine and the KV cache's dtype (the policy's, or FP8 where the model allows it). With several
    nodes, only multiples of a node are tried as the number of training GPUs; with more than 128 GPUs, multiples of about 1/16 of
    all GPUs.
    """
    backend = now.carried_by(backend)
    of_node = int(hw.GPUS_PER_NODE.value)
    unit = of_node * max(1, num_gpus // 128) if num_gpus > of_node else 1  # coarse, because each search takes seconds
    updates = {
        count: _fastest(
            replace(job, shared_bytes=transfer_bytes(backend, num_gpus - count, num_gpus, receives=False)), count, gpu
        )
        for count in range(unit, num_gpus, unit)
    }
    best: dict[tuple[object, ...], Split] = {}
    for setup in _setups(now):
        for count, update in updates.items():
            num_engines = (num_gpus - count) // setup.tensor_parallel
            if update is None or num_engines * setup.tensor_parallel != num_gpus - count:
                continue
            transfer = transfer_bytes(backend, count, num_gpus, receives=True)
            engines = replace(setup, num_engines=num_engines, transfer_bytes=transfer)
            memory = engine_memory(engines, gpu)
            if not memory.fits:
                continue
            time = rollout_time(engines, memory, gpu, demand)
            sync = sync_time(backend, engines, count, update.layout.expert, num_gpus, gpu)
            seconds = step_seconds([time.seconds], [update.time.total], [sync.total], overlap)
            way = (setup.tensor_parallel, setup.kv_cache)
            if way not in best or seconds < best[way].step_s:
                best[way] = Split(count, engines, time.concurrency, time.seconds, update, seconds)
    return sorted(best.values(), key=lambda split: split.step_s)


def _setups(now: EngineSetup) -> Iterator[EngineSetup]:
    """Yield an engine setup for each tensor parallelism that can split the model, and for each dtype of the KV cache.

    An FP8 cache is tried for bfloat16 models without QKV biases. The biases of Qwen2 and Qwen2.5 make keys too large for FP8
    without scales, and the text becomes nonsense (TensorRT-LLM#4218).
    """
    has_other = now.dtype == "bfloat16" and not now.shape.has_qkv_bias
    caches: tuple[Literal["auto", "fp8"], ...] = ("auto", "fp8") if has_other else (now.kv_cache,)
    most = max(now.max_num_seqs, _MAX_NUM_SEQS)
    for tensor, cache in itertools.product(_TENSOR_PARALLEL, caches):
        spreads = now.spreads_experts and tensor > 1
        if why_not_cut(now.shape, VllmOptions(tensor_parallel=tensor, expert_parallel=spreads)) is None:
            yield replace(now, tensor_parallel=tensor, max_num_seqs=most, kv_cache=cache, spreads_experts=spreads)


def _fastest(job: Job, num_trainers: int, gpu: hw.Gpu) -> Option | None:
    found = options(replace(job, training=replace(job.training, world_size=num_trainers)), gpu)
    return found[0] if found and found[0].fits else None
