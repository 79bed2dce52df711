"""The engines of a policy: what fits beside their weights, how fast they decode, how long new weights take to arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.memory import SIZE
from marsrl.trainer.plan.parameters import active_elements, elements


@dataclass(frozen=True)
class EngineSetup:
    """Engines of one policy. memory_share: of a GPU's memory that an engine may take. longest: tokens of a sequence."""

    shape: ModelShape
    num_engines: int
    tensor_parallel: int
    dtype: str
    memory_share: float
    max_num_seqs: int
    longest: int


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine, and what its KV cache holds. kv_cache is negative where the weights do not fit."""

    weights: float
    workspace: float
    kv_cache: float
    kv_bytes_per_token: float
    kv_tokens: int  # of one engine, over its GPUs
    longest_sequences: float  # of maximal length, held at once


@dataclass(frozen=True)
class RolloutTime:
    """Of the completions of one step. concurrency: requests that one engine decodes at once, on average."""

    seconds: float
    concurrency: float
    tokens_per_s_per_engine: float


@dataclass(frozen=True)
class SyncTime:
    """Seconds of one publish through files in /dev/shm, and what the links alone would take."""

    gather: float
    write: float
    checksum: float
    load: float
    links_alone: float

    @property
    def total(self) -> float:
        return self.gather + self.write + self.checksum + self.load


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Keys and values of all layers: 2 L K D e."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * SIZE[dtype]


def engine_memory(setup: EngineSetup, gpu: hw.Gpu) -> EngineMemory:
    """memory x share - weights / TP - workspace is KV cache. More GPUs than KV heads hold copies of these."""
    weights = elements(setup.shape).total * SIZE[setup.dtype] / setup.tensor_parallel
    cache = gpu.memory_bytes * setup.memory_share - weights - hw.ENGINE_WORKSPACE.value
    per_token = kv_bytes_per_token(setup.shape, setup.dtype)
    of_gpu = per_token / min(setup.tensor_parallel, setup.shape.num_kv_heads)
    tokens = max(0, int(cache // of_gpu))
    return EngineMemory(weights, hw.ENGINE_WORKSPACE.value, cache, per_token, tokens, tokens / setup.longest)


def rollout_time(
    setup: EngineSetup, memory: EngineMemory, gpu: hw.Gpu, samples: float, response: float, segments: int
) -> RolloutTime:
    """Decoding bound by memory traffic or by arithmetic, whichever is slower; prompts are not counted.

    iteration = host + max(bytes / bandwidth, 2 P_active c / peak)
    bytes     = weights that c tokens touch + c length KV;  experts touched: 1 - (1 - k/E)^c
    seconds   = tail(segments) samples response / (engines c / iteration)
    """
    length = hw.MEAN_PROMPT.value + response / 2 * hw.LENGTH_SPREAD.value
    concurrency = max(1.0, min(setup.max_num_seqs, memory.kv_tokens / length, samples / setup.num_engines))
    shape, size = setup.shape, SIZE[setup.dtype]
    counts = elements(shape)
    experts = counts.layer_experts * shape.num_layers
    touched = 1 - (1 - shape.experts_per_token / shape.num_experts) ** concurrency if shape.num_experts else 0.0
    weights = (counts.total - experts - (counts.embedding if counts.head else 0) + experts * touched) * size
    traffic = weights + concurrency * length * memory.kv_bytes_per_token
    by_memory = traffic / (setup.tensor_parallel * gpu.bandwidth * hw.MEMORY_SHARE.value)
    by_flops = 2 * active_elements(shape) * concurrency / (setup.tensor_parallel * gpu.flops * hw.GEMM_SHARE.value)
    iteration = hw.ITERATION_S.value + max(by_memory, by_flops)
    rate = concurrency / iteration
    seconds = hw.tail(segments) * samples * response / (setup.num_engines * rate)
    return RolloutTime(seconds, concurrency, rate)


@dataclass(frozen=True)
class Load:
    """What the engines of one policy have to do in a step: so many completions of so many tokens on average."""

    setup: EngineSetup
    memory: EngineMemory
    samples: float
    response: float


def split_engines(loads: Mapping[str, Load], num_gpus: int, gpu: hw.Gpu, segments: int) -> dict[str, int]:
    """Engines of each policy that share so many GPUs, at least one each: of all splits the one that is done first.

    One more engine goes to whoever would be done last, as long as there is room for it.
    """
    counts = dict.fromkeys(loads, 1)
    left = num_gpus - sum(load.setup.tensor_parallel for load in loads.values())
    while True:
        last = max(loads, key=lambda name: _seconds(loads[name], counts[name], gpu, segments))
        left -= loads[last].setup.tensor_parallel
        if left < 0:
            return counts
        counts[last] += 1


def slowest(loads: Mapping[str, Load], counts: Mapping[str, int], gpu: hw.Gpu, segments: int) -> float:
    """Seconds until the last of the policies has decoded its completions."""
    return max(_seconds(load, counts[name], gpu, segments) for name, load in loads.items())


def _seconds(load: Load, num_engines: int, gpu: hw.Gpu, segments: int) -> float:
    setup = replace(load.setup, num_engines=num_engines)
    return rollout_time(setup, load.memory, gpu, load.samples, load.response, segments).seconds


def sync_time(shape: ModelShape, dtype: str, gpu: hw.Gpu, num_gpus: int) -> SyncTime:
    """One file written by rank 0, read by every engine; checksums on both sides, the engines' all at once.

    links_alone: every engine GPU receives its weights over one network adapter (NVLink within a node), nothing else.
    """
    num_bytes = elements(shape).total * SIZE[dtype]
    link = (gpu.nvlink if num_gpus <= hw.GPUS_PER_NODE.value else gpu.network) * hw.LINK_SHARE.value
    pcie = gpu.pcie * hw.LINK_SHARE.value
    return SyncTime(
        gather=num_bytes / link + num_bytes / pcie,
        write=2 * num_bytes / hw.HOST_BANDWIDTH.value,
        checksum=2 * num_bytes / hw.CHECKSUM.value,
        load=num_bytes / hw.HOST_BANDWIDTH.value + num_bytes / pcie,
        links_alone=num_bytes / link,
    )
