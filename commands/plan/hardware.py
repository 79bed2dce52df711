"""All constants of the planner in one table, with sources. No other file of plan/ makes assumptions about a machine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_SHEETS = "NVIDIA data sheet, dense bf16"
_TORCH = "total capacity in torch's out-of-memory messages"
_LINK = "NVIDIA data sheet, one direction"
_DGX = "DGX data sheet, one network adapter per GPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of a node of eight. Bandwidths in bytes/s, one direction.

    attention: share of the peak that an attention kernel reaches in forward and backward. host_memory: bytes of a node.
    """

    memory_bytes: float
    flops: float
    bandwidth: float
    nvlink: float
    network: float
    pcie: float
    attention: float
    host_memory: float

    def link(self, span: int) -> float:
        """Return the bytes/s reached between GPUs of a group that spans `span` neighbouring GPUs."""
        return (self.nvlink if span <= GPUS_PER_NODE.value else self.network) * LINK_SHARE.value


_GIB = 2.0**30
GPUS = {
    "h100-80g": Gpu(79.1 * _GIB, 989e12, 3.35e12, 450e9, 50e9, 64e9, 0.58, 2048 * _GIB),
    "a100-80g": Gpu(79.1 * _GIB, 312e12, 2.039e12, 300e9, 25e9, 32e9, 0.6, 2048 * _GIB),
    "a100-40g": Gpu(39.4 * _GIB, 312e12, 1.555e12, 300e9, 25e9, 32e9, 0.6, 1024 * _GIB),
    "h200-141g": Gpu(139.7 * _GIB, 989e12, 4.8e12, 450e9, 50e9, 64e9, 0.58, 2048 * _GIB),
}
_GPU_SOURCES = {
    "memory_bytes": ("GPU memory", "bytes", _TORCH),
    "flops": ("tensor cores", "FLOP/s", _SHEETS),
    "bandwidth": ("GPU memory bandwidth", "bytes/s", "NVIDIA data sheet"),
    "nvlink": ("NVLink", "bytes/s", _LINK),
    "network": ("network per GPU", "bytes/s", _DGX),
    "pcie": ("PCIe", "bytes/s", _LINK),
    "attention": (
        "attention, share of the peak",
        "",
        "H100: FlashAttention-3 (version 4 uses the same tiles), causal, heads of 128, 8,192 tokens: forward 685, backward 539 "
        "TFLOP/s (meta-pytorch/tritonbench 1267); version 4 measured on one H200, 4,096 tokens: 0.58. A100: FlashAttention-2, "
        "arXiv 2307.08691. Our Triton kernel, used without flash-attn, measured on one H200: 0.14 with 16 sequences of 1k, 0.23 "
        "with 4k",
    ),
    "host_memory": ("host memory of a node", "bytes", "DGX data sheet"),
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A named number with its unit and source."""

    name: str
    value: float
    unit: str
    source: str


_MEASURED = "measured on one H100: 798 of 989 TFLOP/s, 3.0 of 3.35 TB/s; on one H200: 816 TFLOP/s, 4.2 of 4.8 TB/s"
_STEP = "measured on one H200, a step of 3.1 G parameters in 4 micro-batches of 4,096 tokens, Megatron without TransformerEngine"


def _assumed(name: str, value: float, unit: str = "", why: str = "") -> Constant:
    return Constant(name, value, unit, f"assumption, not measured{why}")


_PRIME = "fitted to prime-rl's updates of Qwen3-4B on 8 H100, sequences of 16k and 64k, benchmarks/baselines"
GEMM_SHARE = Constant("linear layers, share of the peak", 0.5, "", f"{_PRIME}; a large GEMM alone: 0.81 ({_MEASURED})")
EXPERT_SHARE = Constant(
    "experts, share of the peak; memory traffic is planned separately",
    0.81,
    "",
    f"a GEMM alone: {_MEASURED}; ratio of planned to measured time: 1.01 (250 rows per expert), 1.01 (1,000), 0.6 (64)",
)
HEAD_SHARE = Constant(
    "output head, share of the peak",
    0.55,
    "",
    "measured on H200s, 16,384 rows, 151,936 columns: 55.4 to 57.3 ms by cuBLAS and Triton, 67 % of a GEMM alone; QuACK: 50.9 ms",
)
GRADIENT_BYTES = Constant(
    "memory traffic of adding a gradient to its float32 buffer",
    15.5,
    "bytes per parameter and micro-batch",
    f"{_STEP}: 44.8 ms; the operations move 10 bytes",
)
EXPERT_GRADIENT_BYTES = Constant(
    "memory traffic of adding an expert's gradient to its float32 buffer, in the GEMM",
    6.4,
    "bytes per parameter and micro-batch",
    f"{_STEP}: 25.7 ms, less 11.5 for the GEMM without adding; adding moves 6 bytes",
)
PERMUTATION_COPIES = Constant(
    "copies of each token's row, to one rank's experts and back",
    3.2,
    "per forward",
    "measured on one H200, forward and backward: 0.80 ms for 16,384 tokens (0.32 ms for 4,096, which would be 5 copies); "
    "Megatron's unfused permutation: 4.07 ms",
)
OPTIMIZER_BYTES = Constant(
    "memory traffic of an optimizer step",
    54,
    "bytes per parameter",
    f"{_STEP}: AdamW 25.5 ms, clipping 5.9 (half of the measured 11.8, which included a copy), norm 3.0, bfloat16 weights 4.3; "
    "without zeroing gradients, which moves 4 bytes for each parameter of the rank",
)
MEMORY_SHARE = Constant("GPU memory, share of the bandwidth", 0.9, "", _MEASURED)
LINK_SHARE = _assumed("NVLink, network and PCIe, share of the bandwidth", 0.8, "", ": large messages")
ALL_REDUCE_S = _assumed("latency of a layer's all-reduce over an engine's GPUs", 15e-6, "s", ": two launches")
BLOCKS = Constant(
    "thread blocks of a deterministic attention backward", 132, "", "multiprocessors of an H100; A100: 108"
)
PINNED = Constant(
    "pinned memory allocated, at most, relative to the request",
    2.0,
    "x",
    "PyTorch's host allocator rounds up to a power of 2",
)
ADAPTED_DECODING = Constant(
    "time of a decoding iteration with adapters, relative to without", 1.36, "x", "TRL, pull request 7017: 1.33 to 1.39"
)
IMBALANCE = _assumed(
    "load of the busiest rank's experts, relative to the mean", 1.3, "", ": router without a balancing loss"
)
HEAD_ROWS = Constant(
    "rows of logits held at once, at 4 bytes per number",
    3600,
    "rows",
    "a bfloat16 row counts half: 4,224 rows of exponentials, 768 of the next chunk, 2,112 packed; with cuBLAS 2,880: 768 rows of "
    "float32 logits, and 4,224 rows of bfloat16 gradients",
)
PROCESS_BYTES = _assumed("CUDA context, NCCL and cuBLAS", 2.5 * _GIB, "bytes")
FRAGMENTATION = _assumed("memory lost to fragmentation", 0.05, "share of the peak")
ENGINE_WORKSPACE = _assumed("an engine's activations and CUDA graphs", 3 * _GIB, "bytes")
_FITTED = "fitted to vLLM's Qwen3-8B on one H100 with 8 to 474 requests, ML.ENERGY leaderboard"
ITERATION_S = Constant("an engine's host time per iteration", 0.0025, "s", _FITTED)
REQUEST_S = Constant("an engine's host time per request and iteration", 74e-6, "s", _FITTED)
LAUNCH_ALONE_S = Constant(
    "launching a layer whose experts are on one rank, forward and backward",
    1.3e-3,
    "s",
    f"{_STEP}: 20 of 220 ms that no other constant explains; in another run the GPU was idle for 25 of 197 ms",
)
LAUNCH_S = Constant(
    "launching a layer whose experts are on several ranks",
    5.9e-3,
    "s",
    "Megatron-Bridge 25.11, Qwen3-30B-A3B on B200, 4,096 tokens: 9.2 ms, of which these formulas explain 3.3",
)
HOST_BANDWIDTH = _assumed(
    "host memory bandwidth, one process", 8e9, "bytes/s", ": copy and write of a file in /dev/shm"
)
CHECKSUM = Constant(
    "checksum of weights, one process", 4.2e9, "bytes/s", "measured on one core of a busy 2.5 GHz Xeon, bound by memory"
)
CHECKSUM_MOVES = Constant(
    "memory traffic of a checksum on a GPU",
    31,
    "bytes per byte of weights",
    "counted from the PyTorch operations in rollout/weights/checksum.py",
)
FP8_MOVES = Constant(
    "bytes moved to round a number to FP8",
    41,
    "",
    "counted from the PyTorch operations in rollout/engines/vllm/worker_fp8.py",
)
_NCCL = "NCCL's source: init.cc, channel.cc, transport/net.cc and p2p.cc"
NCCL_CHANNELS = _assumed(
    "NCCL channels of a communicator of two GPUs on one host", 32, "", ": as NCCL reports for 8 H100"
)
NCCL_CHANNELS_ACROSS = _assumed("NCCL channels of a communicator of two GPUs on two hosts", 4)
NCCL_BUFFER = Constant(
    "NCCL's receive buffers per channel on one host, for all its protocols", 10 * 2.0**20, "bytes", _NCCL
)
NCCL_SHARED = Constant("NCCL's buffers per channel between hosts: 16 chunks of 128 KiB", 2 * 2.0**20, "bytes", _NCCL)
NCCL_SMALL = Constant("allocations per communicator (and 3 per channel), each rounded up to 2 MiB", 2, "", _NCCL)
PIECE_S = _assumed(
    "host time to send and receive a piece of weights",
    120e-6,
    "s",
    " on a GPU: CPU time in benchmarks/weight_sync.py --mib 0 on a busy 2.5 GHz Xeon",
)
CHANGED_SHARE = Constant(
    "share of a policy's parameters that a version changes, for sync.delta",
    0.05,
    "",
    "3 to 5 % at a learning rate of 1e-5, docs/weight_sync.md",
)
HOST_ADAM = _assumed("bandwidth of AdamW in CPU memory, per GPU", 25e9, "bytes/s", ": 200 GB/s for a node of eight")
GPUS_PER_NODE = Constant("GPUs per node", 8, "", "DGX and HGX boards")
POSITIVE_SHARE = _assumed("samples that DMMPT's entropy pass visits", 0.5, "share", ": those with a reward")
MEAN_RESPONSE = _assumed(
    "mean completion, share of rollout.max_response_tokens", 0.35, "", "; set it with --mean-response"
)
LENGTH_SPREAD = _assumed(
    "spread of lengths, E[length^2] / E[length]^2", 1.5, "", "; at most the longest length divided by the mean"
)
MEAN_PROMPT = _assumed("mean prompt", 2048, "tokens", ": problem, solution and report without their thinking")
ASSUMPTIONS = tuple(value for value in list(globals().values()) if isinstance(value, Constant))


def gpu_here() -> Gpu | None:
    """Return the preset nearest to this machine's GPU, with the actual memory of GPU and host; None without a GPU."""
    import os

    import torch

    if not torch.cuda.is_available():
        return None
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    nearest = min(GPUS.values(), key=lambda gpu: abs(gpu.memory_bytes - memory))
    return replace(nearest, memory_bytes=memory, host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def constants(gpu: Gpu) -> list[Constant]:
    """Return all constants that a plan for this GPU uses."""
    gpu_constants = [
        Constant(label, getattr(gpu, field.name), unit, source)
        for field in fields(gpu)
        for label, unit, source in [_GPU_SOURCES[field.name]]
    ]
    return [*gpu_constants, *ASSUMPTIONS]
