"""Other ways to decode and to split the GPUs: what a step would take with each, and how long a step is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from marsrl.rollout.config import VllmOptions
from marsrl.rollout.engines.refusals import why_not_cut
from marsrl.trainer.config import SyncBackend
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.engines import EngineSetup, Load, engine_memory, rollout_time
from marsrl.trainer.plan.ranking import Job, Option, options
from marsrl.trainer.plan.sync import sync_time

_TENSOR_PARALLEL = (1, 2, 4, 8)  # an engine stands on one node
_MAX_NUM_SEQS = 256  # vLLM's default; more requests make its steps longer, not its cache larger


@dataclass(frozen=True)
class Split:
    """So many GPUs train, the others decode. update: the fastest layout that fits on them."""

    num_trainers: int
    engines: EngineSetup
    concurrency: float
    rollout_s: float
    update: Option
    step_s: float


def step_seconds(rollouts: Sequence[float], updates: Sequence[float], syncs: Sequence[float], overlap: int) -> float:
    """Seconds of one step of all policies, from the seconds of each.

    Policies decode side by side, and are updated and published in turn: max(rollouts) + sum(updates) + sum(syncs). With
    rollout.overlap the engines decode while the trainer trains, and only a publish stops both:
    max(max(rollouts), sum(updates)) + sum(syncs).
    """
    rollout, update = max(rollouts), sum(updates)
    return (max(rollout, update) if overlap else rollout + update) + sum(syncs)


def splits(job: Job, load: Load, backend: SyncBackend, overlap: int, num_gpus: int, gpu: hw.Gpu) -> list[Split]:
    """The fastest of each way to decode, one policy alone; the shortest step first.

    Ways: GPUs an engine, KV cache in the policy's dtype or FP8. Trainers: whole nodes where there are several.
    """
    of_node = int(hw.GPUS_PER_NODE.value)
    unit = of_node if num_gpus > of_node else 1
    updates = {count: _fastest(job, count, gpu) for count in range(unit, num_gpus, unit)}
    best: dict[tuple[object, ...], Split] = {}
    for setup in _setups(load.setup):
        memory = engine_memory(setup, gpu)
        for count, update in updates.items():
            num_engines = (num_gpus - count) // setup.tensor_parallel
            if update is None or not memory.fits or num_engines * setup.tensor_parallel != num_gpus - count:
                continue
            engines = replace(setup, num_engines=num_engines)
            time = rollout_time(engines, memory, gpu, load.demand)
            sync = sync_time(backend, engines, memory, count, num_gpus, gpu)
            seconds = step_seconds([time.seconds], [update.time.total], [sync.total], overlap)
            way = (setup.tensor_parallel, setup.kv_cache)
            if way not in best or seconds < best[way].step_s:
                best[way] = Split(count, engines, time.concurrency, time.seconds, update, seconds)
    return sorted(best.values(), key=lambda split: split.step_s)


def _setups(now: EngineSetup) -> Iterator[EngineSetup]:
    """Those that the model can be cut for; a cache in FP8 of a model in bfloat16."""
    caches: tuple[Literal["auto", "fp8"], ...] = ("auto", "fp8") if now.dtype == "bfloat16" else ("auto",)
    most = max(now.max_num_seqs, _MAX_NUM_SEQS)
    for tensor, cache in itertools.product(_TENSOR_PARALLEL, caches):
        spreads = now.spreads_experts and tensor > 1
        if why_not_cut(now.shape, VllmOptions(tensor_parallel=tensor, expert_parallel=spreads)) is None:
            yield replace(now, tensor_parallel=tensor, max_num_seqs=most, kv_cache=cache, spreads_experts=spreads)


def _fastest(job: Job, num_trainers: int, gpu: hw.Gpu) -> Option | None:
    found = options(replace(job, training=replace(job.training, world_size=num_trainers)), gpu)
    return found[0] if found and found[0].fits else None
