"""All constants of the planner in one table, with sources. No other file of plan/ makes assumptions about a machine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

_SHEETS = "NVIDIA data sheet, dense bf16"
_TORCH = "total capacity in torch's out-of-memory messages"
_LINK = "NVIDIA data sheet, one direction"
_DGX = "DGX data sheet, one adapter a GPU"


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
    "network": ("network of a GPU", "bytes/s", _DGX),
    "pcie": ("PCIe", "bytes/s", _LINK),
    "attention": (
        "share of the peak, attention",
        "",
        "H100: FlashAttention-3, whose tiles version 4 has; causal, heads of 128, 8,192 tokens, forward 685 and backward 539 "
        "TFLOP/s (meta-pytorch/tritonbench 1267); version 4 measured on one H200, 4,096 tokens: 0.58. A100: FlashAttention-2, "
        "arXiv 2307.08691. Without flash-attn our Triton kernel: 0.14 of 16 sequences of 1k, 0.23 of 4k, measured on one H200",
    ),
    "host_memory": ("memory of a node", "bytes", "DGX data sheet"),
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A named number with its unit and source."""

    name: str
    value: float
    unit: str
    source: str


_MEASURED = "measured on one H100: 798 of 989 TFLOP/s, 3.0 of 3.35 TB/s; H200: 816, and 4.2 of 4.8"
_STEP = "measured on one H200, a step of 3.1 G numbers in 4 micro-batches of 4,096 tokens, megatron without TransformerEngine"


def _assumed(name: str, value: float, unit: str = "", why: str = "") -> Constant:
    return Constant(name, value, unit, f"assumption, not measured{why}")


_PRIME = "fitted to prime-rl's updates of Qwen3-4B on 8 H100, sequences of 16k and 64k, benchmarks/baselines"
GEMM_SHARE = Constant("share of the peak, linear layers", 0.5, "", f"{_PRIME}; a large bare GEMM: 0.81 ({_MEASURED})")
EXPERT_SHARE = Constant(
    "share of the peak, experts, beside the traffic of weights and rows",
    0.81,
    "",
    f"a bare GEMM's: {_MEASURED}; planned so over measured there: 1.01 (250 rows an expert), 1.01 (1,000), 0.6 (64)",
)
HEAD_SHARE = Constant(
    "share of the peak, output head",
    0.55,
    "",
    "measured on H200s, 16,384 rows, 151,936 columns: 55.4 to 57.3 ms by cuBLAS and Triton, 67 % of a bare GEMM; by QuACK 50.9",
)
GRADIENT_BYTES = Constant(
    "to add a written gradient to its float32 buffer",
    15.5,
    "bytes a number and micro-batch",
    f"{_STEP}: 44.8 ms; 10 by count",
)
EXPERT_GRADIENT_BYTES = Constant(
    "the same of experts, whose GEMM adds",
    6.4,
    "bytes a number and micro-batch",
    f"{_STEP}: 25.7 ms less 11.5 of such a GEMM alone; 6 by count, its own 2 being counted with it",
)
PERMUTATION_COPIES = Constant(
    "copies of tokens' rows, to one rank's experts and back",
    3.2,
    "forward",
    "measured on one H200: forward and backward of 16,384 tokens 0.80 ms (of 4,096 0.32, as if 5); Megatron unfused: 4.07",
)
OPTIMIZER_BYTES = Constant(
    "an update",
    54,
    "bytes a number",
    f"{_STEP}: AdamW 25.5 ms, clipping 5.9 (11.8 there, with a copy), norm 3.0, bfloat16 weights 4.3. Zeroing, 4 more, is of all",
)
MEMORY_SHARE = Constant("share of the memory bandwidth", 0.9, "", _MEASURED)
LINK_SHARE = _assumed("share of NVLink, network and PCIe", 0.8, "", ": large messages")
ALL_REDUCE_S = _assumed("sum of a token's layer over an engine's GPUs", 15e-6, "s", ": start of two rounds")
BLOCKS = Constant("blocks of a deterministic attention backward", 132, "", "multiprocessors of an H100; A100: 108")
PINNED = Constant(
    "pinned memory over what is asked for, at most", 2.0, "", "PyTorch's host allocator takes the next power of 2"
)
ADAPTED_DECODING = Constant(
    "an iteration of engines with adapters over one without", 1.36, "x", "TRL, pull request 7017: 1.33 to 1.39"
)
IMBALANCE = _assumed("busiest rank's experts over the mean", 1.3, "", ": router without a balancing loss")
HEAD_ROWS = Constant(
    "rows of logits held at once",
    3600,
    "rows",
    "4,224 and 768 of bfloat16 exponentials, and 2,112 packed; by cuBLAS 768 of float32 logits and 4,224 of gradients: 2,880",
)
PROCESS_BYTES = _assumed("CUDA context, NCCL and cuBLAS", 2.5 * _GIB, "bytes")
FRAGMENTATION = _assumed("lost to fragmentation", 0.05, "share of the peak")
ENGINE_WORKSPACE = _assumed("engine's activations and graphs", 3 * _GIB, "bytes")
_FITTED = "fitted to vLLM's Qwen3-8B on one H100 with 8 to 474 requests, ML.ENERGY leaderboard"
ITERATION_S = Constant("engine's host time an iteration", 0.0025, "s", _FITTED)
REQUEST_S = Constant("engine's host time a request and iteration", 74e-6, "s", _FITTED)
LAUNCH_ALONE_S = Constant(
    "launching a layer whose experts are on one rank, forward and backward",
    1.3e-3,
    "s",
    f"{_STEP}: 20 of 220 ms are left, and of another run 25 of 197 in which the GPU waits",
)
LAUNCH_S = Constant(
    "launching a layer whose experts are on several ranks",
    5.9e-3,
    "s",
    "Megatron-Bridge 25.11, Qwen3-30B-A3B on B200, 4,096 tokens: 9.2 ms, of which 3.3 are work by these formulas",
)
HOST_BANDWIDTH = _assumed("host memory, one process", 8e9, "bytes/s", ": copy and write of a file in /dev/shm")
CHECKSUM = Constant(
    "checksum of weights, one process", 4.2e9, "bytes/s", "measured on one core of a busy 2.5 GHz Xeon, bound by memory"
)
CHECKSUM_MOVES = Constant(
    "bytes moved a byte of a checksum on a GPU", 31, "", "PyTorch's operations of rollout/weights/checksum.py, counted"
)
FP8_MOVES = Constant(
    "bytes moved to round a number to FP8",
    41,
    "",
    "PyTorch's operations of rollout/engines/vllm/worker_fp8.py, counted",
)
_NCCL = "NCCL's source: init.cc, channel.cc, transport/net.cc and p2p.cc"
NCCL_CHANNELS = _assumed("channels of a communicator of two GPUs, one host", 32, "", ": as NCCL reports of 8 H100")
NCCL_CHANNELS_ACROSS = _assumed("channels of a communicator of two GPUs, two hosts", 4)
NCCL_BUFFER = Constant("receiver's buffers of a channel on one host, of all protocols", 10 * 2.0**20, "bytes", _NCCL)
NCCL_SHARED = Constant("buffers of a channel between hosts: 16 chunks of 128 KiB", 2 * 2.0**20, "bytes", _NCCL)
NCCL_SMALL = Constant("allocations of a communicator (and 3 a channel), each rounded up to 2 MiB", 2, "", _NCCL)
PIECE_S = _assumed(
    "host time of a piece, both ends", 120e-6, "s", " on a GPU: CPU time by weight_sync.py --mib 0, a busy 2.5 GHz Xeon"
)
CHANGED_SHARE = Constant(
    "numbers of a policy that a version changes, for sync.delta",
    0.05,
    "",
    "3 to 5 % at a learning rate of 1e-5, docs/weight_sync.md",
)
HOST_ADAM = _assumed("AdamW in CPU memory, one GPU's share", 25e9, "bytes/s", ": 200 GB/s a node of eight")
GPUS_PER_NODE = Constant("GPUs a node", 8, "", "DGX and HGX boards")
POSITIVE_SHARE = _assumed("samples that DMMPT's entropy pass visits", 0.5, "share", ": the rewarded ones")
MEAN_RESPONSE = _assumed("mean completion over rollout.max_response_tokens", 0.35, "", "; --mean-response sets it")
LENGTH_SPREAD = _assumed("E[length^2] / E[length]^2", 1.5, "", "; at most the longest over the mean")
MEAN_PROMPT = _assumed("mean prompt", 2048, "tokens", ": problem, solution and report without their thinking")
ASSUMPTIONS = tuple(each for each in list(globals().values()) if isinstance(each, Constant))


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
    of_gpu = [
        Constant(label, getattr(gpu, field.name), unit, source)
        for field in fields(gpu)
        for label, unit, source in [_GPU_SOURCES[field.name]]
    ]
    return [*of_gpu, *ASSUMPTIONS]
