"""The engines of a policy: memory beside their weights, decoding speed, and the time of a publish."""

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
from marsrl.rollout.engines.vllm.arguments import slot_rank
from marsrl.rollout.model_shape import ModelShape
from marsrl.rollout.weights.layout import FP8_BLOCK
from marsrl.trainer.config import SyncBackend
from marsrl.trainer.learner.megatron.layout import Layout


@dataclass(frozen=True)
class EngineSetup:
    """Engines of one policy. memory_share: share of a GPU's memory for an engine. longest: tokens of the longest sequence.

    kv_cache, weights: fp8 stores keys and values, or the layers' matrices, in one byte a number; auto: in dtype. cache_bytes:
    size of the cache on each GPU, regardless of memory_share; None: what memory_share leaves. spreads_experts: each expert is
    whole on one of the engine's GPUs.
    adapters: those that it serves, a slot each. transfer_bytes: NCCL's on each GPU, for publishes, beside memory_share.
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
    transfer_bytes: float = 0.0
    weights: Literal["auto", "fp8"] = "auto"

    @property
    def experts_of_gpu(self) -> int:
        """Whole experts on the fullest GPU; 0 if experts are split, or there are none."""
        return -(-self.shape.num_experts // self.tensor_parallel) if self.spreads_experts else 0

    @property
    def imbalance(self) -> float:
        """Active experts on the busiest GPU over the mean: 1 if every GPU has a part of each."""
        return hw.IMBALANCE.value if self.experts_of_gpu else 1.0

    @property
    def kv_parts(self) -> int:
        return min(self.tensor_parallel, self.shape.num_kv_heads)

    @property
    def num_gpus(self) -> int:
        return self.num_engines * self.tensor_parallel

    def carried_by(self, backend: SyncBackend) -> SyncBackend:
        """Return the backend by which a publish travels: adapters always go as files."""
        return "shm" if self.adapters else backend

    @property
    def words(self) -> str:
        """`10 x 4, fp8 weights, fp8 cache`."""
        parts = {"fp8 weights": self.weights, "fp8 cache": self.kv_cache}
        return ", ".join(
            [f"{self.num_engines} x {self.tensor_parallel}", *(n for n, each in parts.items() if each == "fp8")]
        )


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on one GPU of an engine, and the capacity of its KV cache. kv_cache is negative if the weights do not fit.

    taken: bytes of the GPU in use. has_room: that many are available.
    """

    weights: float
    workspace: float
    kv_cache: float
    taken: float
    has_room: bool
    kv_bytes_per_token: float
    kv_tokens: int  # of one engine, over its GPUs
    longest_sequences: float  # sequences of maximal length at once

    @property
    def fits(self) -> bool:
        """True if vLLM can start: the cache fits, and a sequence of maximal length fits in it."""
        return self.has_room and self.longest_sequences >= 1


@dataclass(frozen=True)
class Demand:
    """A step's completions. prompt, response: mean tokens of one; group_size: samples of a prompt, whose keys are computed
    once; tokens_per_stage: most that one decodes in a stage; overlaps: decoding continues while new weights arrive."""

    samples: float
    prompt: float
    response: float
    group_size: int
    segments: int
    tokens_per_stage: int
    overlaps: bool

    @property
    def parts(self) -> float:
        """Stages that a completion spans, on average."""
        return 1.0 if self.segments == 1 else self.response / self.tokens_per_stage + 0.5

    @property
    def waiting(self) -> float:
        """Iterations in which a stage waits for its longest completions: the longest part less the mean one. With overlap the
        next stage's fill the engines meanwhile."""
        return 0.0 if self.overlaps else max(0.0, self.tokens_per_stage - self.response / self.parts)

    @property
    def length(self) -> float:
        """Mean tokens of a request while it is decoded; a long one is there for longer."""
        longest = self.tokens_per_stage * self.segments
        return self.prompt + self.response / 2 * min(hw.LENGTH_SPREAD.value, longest / self.response)


@dataclass(frozen=True)
class RolloutTime:
    """Seconds to decode one step's completions. concurrency: mean number of requests that an engine decodes at once.

    prefill: part of the seconds for prompts and for prefixes that are read again; prefilled: tokens of both.
    """

    seconds: float
    concurrency: float
    tokens_per_s_per_engine: float
    prefill: float
    prefilled: float


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Return the keys and values of all layers: 2 L K D e."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * (1 if dtype == "fp8" else SIZE[dtype])


def engine_memory(setup: EngineSetup, gpu: hw.Gpu) -> EngineMemory:
    """KV cache = memory x share - weights of a GPU - workspace, unless its size is given. More GPUs than KV heads hold copies of
    the heads."""
    weights = _weight_bytes(setup) + slot_bytes(setup)
    workspace, cache = hw.ENGINE_WORKSPACE.value, setup.cache_bytes
    if cache is None:
        cache = gpu.memory_bytes * setup.memory_share - weights - workspace
    per_token = kv_bytes_per_token(setup.shape, setup.dtype if setup.kv_cache == "auto" else "fp8")
    tokens = max(0, int(cache // (per_token / setup.kv_parts)))
    taken = weights + workspace + cache + setup.transfer_bytes
    return EngineMemory(
        weights, workspace, cache, taken, taken <= gpu.memory_bytes, per_token, tokens, tokens / setup.longest
    )


def rollout_time(setup: EngineSetup, memory: EngineMemory, gpu: hw.Gpu, demand: Demand) -> RolloutTime:
    """Decoding bound by memory traffic or by arithmetic, whichever is slower, and prompts by arithmetic, one after the other.

    iterations = samples response / (engines most) + waiting      most: requests that an engine can decode at once
    c          = samples response / (engines iterations)          those that it does, on average
    iteration  = host + c of a request + max(bytes / bandwidth, 2 P_active c / peak) + collectives
    bytes      = of a GPU: weights that c tokens touch + c length KV;  experts touched: 1 - (1 - k/E)^c
    experts that lie whole on the GPUs: those of the busiest, touched and products times the imbalance (read once each at most)
    collectives = 2 L (latency + 2 c H e (t-1)/t / NVLink)            attention and MLP of each layer, t = TP > 1
    seconds    = iterations iteration + prefill
    prefilled  = samples prompt / group + samples max(0, parts - 1) length (+ engines c length with overlap)
    prefill    = prefilled (2 P_active + 2 N D L length) / (engines t peak)

    A completion that continues in another stage is read again, as are all running ones at a publish: new weights empty the
    cache. UloRL's seconds of a step with 1, 2 and 4 segments, 1240, 774 and 601 (arXiv 2507.19766), have a part that halves with
    them, as `waiting` nearly does.
    """
    shape, tensor, length = setup.shape, setup.tensor_parallel, demand.length
    of_engine = demand.samples * demand.response / setup.num_engines
    most = max(1.0, min(setup.max_num_seqs, memory.kv_tokens / length, demand.samples / setup.num_engines))
    iterations = of_engine / most + demand.waiting
    concurrency = of_engine / iterations
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
    looked_up = embedding if elements(setup.shape).head else 0.0  # not read
    return _cut_bytes(setup, touched=1.0) + _whole_bytes(setup) + looked_up


def _cut_bytes(setup: EngineSetup, touched: float) -> float:
    """Return the bytes on one GPU of the weights split over an engine's GPUs; of the experts, the share that is read."""
    counts, shape, tensor = elements(setup.shape), setup.shape, setup.tensor_parallel
    of_fullest = setup.experts_of_gpu / shape.num_experts * tensor if setup.experts_of_gpu else 1.0  # over the mean
    size, padding = float(SIZE[setup.dtype]), 1.0
    if setup.weights == "fp8":
        size = 1 + SIZE["float32"] / FP8_BLOCK**2  # a scale a block
        width = shape.ffn_size / (1 if setup.spreads_experts else tensor)
        padding = math.ceil(width / FP8_BLOCK) * FP8_BLOCK / width  # vLLM's, of an expert's part
    of_layers = counts.layer_cut + counts.layer_experts * touched * of_fullest * padding
    return (shape.num_layers * of_layers * size + (counts.head or counts.embedding) * SIZE[setup.dtype]) / tensor


def _whole_bytes(setup: EngineSetup) -> float:
    """Return the bytes of weights that each of an engine's GPUs holds whole: norms and router."""
    counts = elements(setup.shape)
    return (setup.shape.num_layers * counts.layer_whole + counts.final_norm) * SIZE[setup.dtype]


def slot_bytes(setup: EngineSetup) -> float:
    """Bytes on one GPU of the slots of all adapters. Every one has the largest rank of all, of experts too, and all that any
    adapter targets; what is cut is cut as in training."""
    if not setup.adapters:
        return 0.0
    rank = slot_rank(setup.shape, setup.adapters)
    targets = tuple(dict.fromkeys(target for each in setup.adapters for target in each.targets))
    slot = AdapterConfig(rank=rank, expert_rank=rank, targets=targets)
    spread = setup.tensor_parallel if setup.spreads_experts else 1
    layout = Layout(setup.tensor_parallel, spread, 1, 1, 1)
    of_gpu = adapter_elements(setup.shape, layout, (slot,))
    expert: float = of_gpu.expert
    if not setup.spreads_experts:  # of gate and up B is cut, of down A
        s = setup.shape
        whole, cut = 3 * s.hidden_size, 3 * s.ffn_size / setup.tensor_parallel
        expert = s.num_layers * s.num_experts * rank * (whole + cut) if "experts" in targets else 0.0
    return len(setup.adapters) * (of_gpu.dense + expert) * SIZE[setup.dtype]


def publish_bytes(setup: EngineSetup, adapter: AdapterConfig) -> int:
    """Return the bytes of an adapter's PEFT file."""
    return adapter_elements(setup.shape, Layout(1, 1, 1, 1, 1), (adapter,)).total * SIZE[setup.dtype]


@dataclass(frozen=True)
class SyncTime:
    """Seconds of the parts of one publish, which run in turn; 0: not part of this backend.

    gather: the whole model on rank 0 and into its host's memory. write, load: files. send: between GPUs. copy: into and out of
    buckets. checksum: of the sent and the received weights. links_alone: only the time for an engine GPU to receive its weights.
    with_delta: all of it with sync.delta=true; 0: by another backend than nccl.
    """

    backend: SyncBackend
    gather: float = 0.0
    write: float = 0.0
    load: float = 0.0
    send: float = 0.0
    copy: float = 0.0
    checksum: float = 0.0
    links_alone: float = 0.0
    with_delta: float = 0.0

    @property
    def total(self) -> float:
        return self.gather + self.write + self.load + self.send + self.copy + self.checksum


def transfer_bytes(backend: SyncBackend, peers: int, num_gpus: int, *, receives: bool) -> float:
    """NCCL's bytes on a GPU for publishes by nccl: a communicator with each of its peers, engine GPUs or trainer ranks.

    peers ((2 + 3 channels) 2 MiB + channels buffers)      on one host only who receives has buffers
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
    """Return the seconds of a sync of one policy's engines; backend: as it is after placement.with_backend.

    M = bytes of the model, S = of an engine GPU's shard as it is sent, n = ranks, N = pieces, with `expert` ranks for a layer's
    experts; link = NVLink where all GPUs are on one node, else a GPU's network. Checksums on GPUs move 31 bytes of memory a byte.

        shm    gather M / link + M / PCIe     write 2 M / host memory      load S / host memory + S / PCIe, all engines at once
               checksum M / a core's + 31 S / memory
        nccl   send max(s, S) / link          copy (2 / memory + host N / S) max(s, S)     checksum 31 (M / n + S) / memory
               s = engines TP S / n: what a rank sends; ranks that hold the same share the work, none gathers
               host: of a piece
               delta: send c (e + 2) / e of that, and 3 s / memory more to compare and keep; c: share of numbers that changed
        ipc    send (s + S)(n - 1)/n / link   copy (2 / memory + host N / S) (s + S)       checksum as nccl
               a rank passes on what its own engine GPU gets, and sends to the others' in the same thread

    Adapters go as files, one after the other, and every GPU reads all of each; M and S are then the sum of theirs.
    """
    model, shard = float(elements(setup.shape).total * SIZE[setup.dtype]), _weight_bytes(replace(setup, weights="auto"))
    backend = setup.carried_by(backend)
    if setup.adapters:
        model = shard = sum(float(publish_bytes(setup, each)) for each in setup.adapters)
    link, pcie, bandwidth = gpu.link(num_gpus), gpu.pcie * hw.LINK_SHARE.value, gpu.bandwidth * hw.MEMORY_SHARE.value
    summed = hw.CHECKSUM_MOVES.value / bandwidth  # seconds a byte
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
    found = SyncTime(
        backend,
        send=over_links / link,
        copy=passed * (2 / bandwidth + hw.PIECE_S.value * num_pieces(setup.shape, expert) / shard),
        checksum=(model / num_trainers + shard) * summed,
        links_alone=shard / link,
    )
    if backend == "ipc":
        return found
    changed = hw.CHANGED_SHARE.value * (1 + 2 / SIZE[setup.dtype])  # bytes that are sent, of those of all numbers
    return replace(found, with_delta=found.total - found.send * (1 - changed) + 3 * sent / bandwidth)
