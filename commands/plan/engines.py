"""Engines of a policy: memory, decoding speed, and the time to publish weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.memory import SIZE
from marsrl.commands.plan.parameters import (
    active_elements,
    active_expert_elements,
    adapter_elements,
    elements,
    num_pieces,
)
from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.engines.draft import DraftSize
from marsrl.rollout.engines.vllm.arguments import slot_rank
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import FP8_BLOCK
from marsrl.trainer.config import SyncBackend
from marsrl.trainer.learner.megatron.layout import Layout


@dataclass(frozen=True)
class EngineSetup:
    """Engines of one policy. memory_share: share of a GPU's memory for an engine. longest: tokens of the longest sequence.

    kv_cache, weights: format of keys and values, and of the layers' matrices. fp8: one byte per number; auto: `dtype`.
    cache_bytes: size of the KV cache on each GPU; None: the memory that memory_share leaves beside the weights.
    spreads_experts: expert parallelism, where each expert is whole on one of the engine's GPUs.
    adapters: trained adapters, each in its own slot. more_slots: number of slots for past adapters (league).
    transfer_bytes: bytes of NCCL's buffers on each GPU, which memory_share does not include.
    draft: size of the model that proposes draft tokens; every GPU holds all of it. None: no such model.
    """

    shape: ModelShape
    num_engines: int
    tensor_parallel: int
    dtype: Literal["float32", "bfloat16"]
    memory_share: float
    max_num_seqs: int
    longest: int
    kv_cache: Literal["auto", "fp8"] = "auto"
    cache_bytes: float | None = None
    spreads_experts: bool = False
    adapters: tuple[AdapterConfig, ...] = ()
    more_slots: int = 0
    transfer_bytes: float = 0.0
    weights: Literal["auto", "fp8"] = "auto"
    draft: DraftSize | None = None

    @property
    def experts_of_gpu(self) -> int:
        """Number of whole experts on the fullest GPU; 0 if experts are split over GPUs or the model has none."""
        return -(-self.shape.num_experts // self.tensor_parallel) if self.spreads_experts else 0

    @property
    def imbalance(self) -> float:
        """Active experts on the busiest GPU, divided by the mean over GPUs; 1 if every GPU has a part of each expert."""
        return hw.IMBALANCE.value if self.experts_of_gpu else 1.0

    @property
    def kv_parts(self) -> int:
        return min(self.tensor_parallel, self.shape.num_kv_heads)

    @property
    def num_gpus(self) -> int:
        return self.num_engines * self.tensor_parallel

    def carried_by(self, backend: SyncBackend) -> SyncBackend:
        """Return the backend that a publish uses: adapters always travel as files."""
        return "shm" if self.adapters else backend

    @property
    def words(self) -> str:
        """Short description, such as `10 x 4, fp8 weights, fp8 cache`."""
        parts = {"fp8 weights": self.weights, "fp8 cache": self.kv_cache}
        return ", ".join(
            [f"{self.num_engines} x {self.tensor_parallel}", *(n for n, each in parts.items() if each == "fp8")]
        )


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine, and the capacity of the engine's KV cache. kv_cache is negative if the weights do not fit.

    taken: bytes in use on the GPU. has_room: True if the GPU has at least this much memory.
    """

    weights: float
    workspace: float
    kv_cache: float
    taken: float
    has_room: bool
    kv_bytes_per_token: float
    kv_tokens: int  # capacity of one engine, over all its GPUs
    longest_sequences: float  # sequences of maximum length that fit at once

    @property
    def fits(self) -> bool:
        """True if vLLM can start: the cache fits, and holds a sequence of maximum length."""
        return self.has_room and self.longest_sequences >= 1


@dataclass(frozen=True)
class Demand:
    """A step's completions.

    samples: number of completions.
    prompt, response: mean number of tokens of a prompt and of a completion.
    group_size: number of samples that share a prompt; the prompt's keys and values are computed once.
    segments: maximum number of stages of a completion.
    tokens_per_stage: maximum number of tokens of a completion in one stage.
    overlaps: True if decoding continues while new weights arrive.
    """

    samples: float
    prompt: float
    response: float
    group_size: int
    segments: int
    tokens_per_stage: int
    overlaps: bool

    @property
    def parts(self) -> float:
        """Mean number of stages that a completion spans."""
        return 1.0 if self.segments == 1 else self.response / self.tokens_per_stage + 0.5

    @property
    def waiting(self) -> float:
        """Iterations in which a stage waits for its longest completions: largest minus mean tokens of a completion in a stage.

        With overlap, completions of the next stage fill the engines meanwhile.
        """
        return 0.0 if self.overlaps else max(0.0, self.tokens_per_stage - self.response / self.parts)

    @property
    def length(self) -> float:
        """Mean length in tokens of the requests being decoded at any moment; long requests weigh more, as they take longer."""
        longest = self.tokens_per_stage * self.segments
        return self.prompt + self.response / 2 * min(hw.LENGTH_SPREAD.value, longest / self.response)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds to decode one step's completions.

    concurrency: mean number of requests that an engine decodes at once.
    prefill: seconds, out of `seconds`, for prompts and for prefixes that are computed again.
    prefilled: number of tokens of these prompts and prefixes.
    """

    seconds: float
    concurrency: float
    tokens_per_s_per_engine: float
    prefill: float
    prefilled: float


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Return the bytes per token of the keys and values of all layers: 2 L K D e."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * (1 if dtype == "fp8" else SIZE[dtype])


def engine_memory(setup: EngineSetup, gpu: hw.Gpu) -> EngineMemory:
    """Compute the memory of an engine: KV cache = memory x share - weights on a GPU - workspace, unless cache_bytes is set.

    If an engine has more GPUs than KV heads, several GPUs hold a copy of the same head.
    """
    weights = _weight_bytes(setup) + slot_bytes(setup)
    if setup.draft is not None:
        weights += setup.draft.num_bytes
    workspace, cache = hw.ENGINE_WORKSPACE.value, setup.cache_bytes
    if cache is None:
        cache = gpu.memory_bytes * setup.memory_share - weights - workspace
    dtype = setup.dtype if setup.kv_cache == "auto" else "fp8"
    per_token = kv_bytes_per_token(setup.shape, dtype)
    if setup.draft is not None:
        per_token += setup.draft.kv_numbers * (1 if dtype == "fp8" else SIZE[dtype])
    tokens = max(0, int(cache // (per_token / setup.kv_parts)))
    taken = weights + workspace + cache + setup.transfer_bytes
    return EngineMemory(
        weights, workspace, cache, taken, taken <= gpu.memory_bytes, per_token, tokens, tokens / setup.longest
    )


def rollout_time(setup: EngineSetup, memory: EngineMemory, gpu: hw.Gpu, demand: Demand) -> RolloutTime:
    """Compute decoding time as the slower of memory traffic and arithmetic, plus prefill time by arithmetic.

    iterations = samples response / (engines most) + waiting      most: requests that an engine can decode at once
    c          = samples response / (engines iterations)          requests that an engine decodes at once, on average
    iteration  = host time + c x host time of a request + max(bytes / bandwidth, 2 P_active c / peak) + collectives
    bytes      = per GPU: weights that c tokens touch + c length KV;   share of experts touched: 1 - (1 - k/E)^c
    with expert parallelism, the busiest GPU reads and multiplies `imbalance` times as much, but reads each expert at most once
    collectives = 2 L (latency + 2 c H e (t-1)/t / NVLink)            attention and MLP of each layer, t = TP > 1
    seconds    = iterations iteration + prefill
    prefilled  = samples prompt / group + samples max(0, parts - 1) length (+ engines c length with overlap)
    prefill    = prefilled (2 P_active + 2 N D L length) / (engines t peak)

    The prefix of a completion that continues in another stage is computed again, as are the prefixes of all running completions
    at a publish, since new weights empty the cache. UloRL's steps with 1, 2 and 4 segments take 1240, 774 and 601 s (arXiv
    2507.19766): a part of the time halves whenever the number of segments doubles, as `waiting` nearly does here.
    """
    shape, tensor, length = setup.shape, setup.tensor_parallel, demand.length
    engine_tokens = demand.samples * demand.response / setup.num_engines
    most = max(1.0, min(setup.max_num_seqs, memory.kv_tokens / length, demand.samples / setup.num_engines))
    iterations = engine_tokens / most + demand.waiting
    concurrency = engine_tokens / iterations
    touched = 1 - (1 - shape.experts_per_token / shape.num_experts) ** concurrency if shape.num_experts else 0.0
    touched = min(1.0, touched * setup.imbalance)
    traffic = _cut_bytes(setup, touched) + _whole_bytes(setup)
    traffic += concurrency * length * memory.kv_bytes_per_token / setup.kv_parts
    by_memory = traffic / (gpu.bandwidth * hw.MEMORY_SHARE.value)
    peak = tensor * gpu.flops * hw.GEMM_SHARE.value
    active = active_elements(shape) + (setup.imbalance - 1) * active_expert_elements(shape)
    by_flops = 2 * active * concurrency / peak
    collectives = 0.0
    if tensor > 1:
        num_bytes = 2 * concurrency * shape.hidden_size * SIZE[setup.dtype] * (tensor - 1) / tensor
        collectives = 2 * shape.num_layers * (hw.ALL_REDUCE_S.value + num_bytes / (gpu.nvlink * hw.LINK_SHARE.value))
    iteration = hw.ITERATION_S.value + concurrency * hw.REQUEST_S.value + max(by_memory, by_flops) + collectives
    iteration *= hw.ADAPTED_DECODING.value if setup.adapters else 1.0
    rate = concurrency / iteration
    prefilled = demand.samples * (demand.prompt / demand.group_size + max(0.0, demand.parts - 1) * length)
    if demand.overlaps:
        prefilled += setup.num_engines * concurrency * length
    scores = 2 * shape.num_heads * shape.head_size * shape.num_layers * length
    prefill = prefilled * (2 * active + scores) / (setup.num_engines * peak)
    return RolloutTime(iterations * iteration + prefill, concurrency, rate, prefill, prefilled)


def _weight_bytes(setup: EngineSetup) -> float:
    """Return the bytes of weights on one of an engine's GPUs, without adapters."""
    embedding = elements(setup.shape).embedding * SIZE[setup.dtype] / setup.tensor_parallel
    looked_up = embedding if elements(setup.shape).head else 0.0  # not in _cut_bytes, because a lookup reads few rows
    return _cut_bytes(setup, touched=1.0) + _whole_bytes(setup) + looked_up


def _cut_bytes(setup: EngineSetup, touched: float) -> float:
    """Return the bytes per GPU of the weights that an engine's GPUs split. touched: share of the experts that is read."""
    counts, size = elements(setup.shape), float(SIZE[setup.dtype])
    if setup.weights == "fp8":
        size = 1 + SIZE["float32"] / FP8_BLOCK**2  # one scale per block
    head = (counts.head or counts.embedding) * SIZE[setup.dtype] / setup.tensor_parallel
    return _layer_numbers(setup, touched) * size + head


def _layer_numbers(setup: EngineSetup, touched: float = 1.0) -> float:
    """Return how many numbers of the layers' matrices a GPU holds, experts' padding included.

    touched: share of the experts to count, for example those that a batch is routed to.
    """
    counts, shape, tensor = elements(setup.shape), setup.shape, setup.tensor_parallel
    # Experts on the fullest GPU, divided by the mean over the GPUs.
    of_fullest = setup.experts_of_gpu / shape.num_experts * tensor if setup.experts_of_gpu else 1.0
    padding = 1.0
    if setup.weights == "fp8":
        width = shape.ffn_size / (1 if setup.spreads_experts else tensor)
        padding = math.ceil(width / FP8_BLOCK) * FP8_BLOCK / width  # vLLM pads each expert's part to whole blocks
    return shape.num_layers * (counts.layer_cut + counts.layer_experts * touched * of_fullest * padding) / tensor


def _whole_bytes(setup: EngineSetup) -> float:
    """Return the bytes of the weights that every GPU of an engine holds whole: norms and router."""
    counts = elements(setup.shape)
    return (setup.shape.num_layers * counts.layer_whole + counts.final_norm) * SIZE[setup.dtype]


def slot_bytes(setup: EngineSetup) -> float:
    """Return the bytes per GPU of the slots of all adapters.

    Every slot has the largest rank of any adapter (for experts too), and the target modules of all adapters. Matrices are split
    as in training.
    """
    if not setup.adapters:
        return 0.0
    rank = slot_rank(setup.shape, setup.adapters)
    targets = tuple(dict.fromkeys(target for each in setup.adapters for target in each.targets))
    slot = AdapterConfig(rank=rank, expert_rank=rank, targets=targets)
    spread = setup.tensor_parallel if setup.spreads_experts else 1
    layout = Layout(setup.tensor_parallel, spread, 1, 1, 1)
    gpu_elements = adapter_elements(setup.shape, layout, (slot,))
    expert: float = gpu_elements.expert
    if not setup.spreads_experts:  # B of gate and up and A of down are split
        s = setup.shape
        whole, cut = 3 * s.hidden_size, 3 * s.ffn_size / setup.tensor_parallel
        expert = s.num_layers * s.num_experts * rank * (whole + cut) if "experts" in targets else 0.0
    return (len(setup.adapters) + setup.more_slots) * (gpu_elements.dense + expert) * SIZE[setup.dtype]


def publish_bytes(setup: EngineSetup, adapter: AdapterConfig) -> int:
    """Return the bytes of an adapter's PEFT file."""
    return adapter_elements(setup.shape, Layout(1, 1, 1, 1, 1), (adapter,)).total * SIZE[setup.dtype]


@dataclass(frozen=True)
class SyncTime:
    """Seconds of the parts of one publish, which run one after the other; 0 for parts that the backend does not have.

    gather: collect the whole model on rank 0, and copy it to host memory.
    write, load: write and load files.
    send: transfer between GPUs.
    copy: copy into and out of buckets.
    checksum: compute checksums of the sent and the received weights, and of the numbers in FP8.
    quantise: round the received weights to FP8; for files this is a part of `load`, and not counted.
    links_alone: seconds in which a GPU of an engine could receive its weights, without any other work.
    with_delta: total with sync.delta=true; 0 unless the backend is nccl and the engine keeps the weights in the sent dtype.
    """

    backend: SyncBackend
    gather: float = 0.0
    write: float = 0.0
    load: float = 0.0
    send: float = 0.0
    copy: float = 0.0
    checksum: float = 0.0
    quantise: float = 0.0
    links_alone: float = 0.0
    with_delta: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.write + self.load + self.send + self.copy + self.checksum + self.quantise


def transfer_bytes(backend: SyncBackend, peers: int, num_gpus: int, *, receives: bool) -> float:
    """Return NCCL's bytes on a GPU for publishes by nccl, with one communicator per peer (engine GPU or trainer rank).

    peers ((2 + 3 channels) 2 MiB + channels buffers)      on one host only the receiver has buffers
    """
    if backend != "nccl":
        return 0.0
    is_one_host = num_gpus <= hw.GPUS_PER_NODE.value
    channels = hw.NCCL_CHANNELS.value if is_one_host else hw.NCCL_CHANNELS_ACROSS.value
    buffers = (hw.NCCL_BUFFER.value if receives else 0.0) if is_one_host else hw.NCCL_SHARED.value
    return peers * ((hw.NCCL_SMALL.value + 3 * channels) * 2 * 2.0**20 + channels * buffers)


def sync_time(
    backend: SyncBackend, setup: EngineSetup, num_trainers: int, expert: int, num_gpus: int, gpu: hw.Gpu
) -> SyncTime:
    """Return the seconds of a sync of one policy's engines. backend: the backend chosen by placement.with_backend.

    M = bytes of the model, S = bytes of an engine GPU's shard as sent, n = trainer ranks, N = pieces that are sent
    (parameters.num_pieces); link = NVLink if all GPUs are on one node, else a GPU's network. Checksums on GPUs move 31 bytes
    per byte of weights.

        shm    gather M / link + M / PCIe     write 2 M / host memory      load S / host memory + S / PCIe, all engines at once
               checksum M / a core's + 31 S / memory
        nccl   send max(s, S) / link          copy (2 / memory + host N / S) max(s, S)     checksum 31 (M / n + S) / memory
               s = engines TP S / n: bytes that a rank sends; ranks with the same weights share the work
               host: host time per piece; no rank gathers the model
               delta: send x c (e + 2) / e, where c is the share of numbers that changed; and 3 s / memory, to compare
               with the last version and store the new one
        ipc    send (s + S)(n - 1)/n / link   copy (2 / memory + host N / S) (s + S)       checksum as nccl
               a rank relays the weights of the engine on its own GPU, and sends to the other relays in the same thread
        FP8    by nccl and ipc, an engine GPU rounds its P numbers: quantise 41 P / memory. It computes their checksum as they
               are written and again at the end: checksum + 2 x 31 P / memory

    Adapters travel as files, one after the other, and every GPU reads each file whole; M and S are then sums over adapters.
    """
    model, shard = float(elements(setup.shape).total * SIZE[setup.dtype]), _weight_bytes(replace(setup, weights="auto"))
    backend = setup.carried_by(backend)
    if setup.adapters:
        model = shard = sum(float(publish_bytes(setup, each)) for each in setup.adapters)
    link, pcie, bandwidth = gpu.link(num_gpus), gpu.pcie * hw.LINK_SHARE.value, gpu.bandwidth * hw.MEMORY_SHARE.value
    summed = hw.CHECKSUM_MOVES.value / bandwidth  # seconds per byte
    if backend == "shm":
        return SyncTime(
            backend,
            gather=model / link + model / pcie,
            write=2 * model / hw.HOST_BANDWIDTH.value,
            load=shard / hw.HOST_BANDWIDTH.value + shard / pcie,
            checksum=model / hw.CHECKSUM.value + shard * summed,
            links_alone=shard / link,
        )
    sent = setup.num_gpus * shard / num_trainers
    passed, over_links = max(sent, shard), max(sent, shard)
    if backend == "ipc":
        passed = sent + shard
        over_links = passed * (num_trainers - 1) / num_trainers
    rounded = _layer_numbers(setup) if setup.weights == "fp8" else 0.0
    time = SyncTime(
        backend,
        send=over_links / link,
        copy=passed * (2 / bandwidth + hw.PIECE_S.value * num_pieces(setup.shape, expert) / shard),
        checksum=(model / num_trainers + shard + 2 * rounded) * summed,
        quantise=rounded * hw.FP8_MOVES.value / bandwidth,
        links_alone=shard / link,
    )
    if backend == "ipc" or rounded:
        return time
    changed = hw.CHANGED_SHARE.value * (1 + 2 / SIZE[setup.dtype])  # share of all bytes that is sent
    return replace(time, with_delta=time.total - time.send * (1 - changed) + 3 * sent / bandwidth)
