"""From the trainer's tensors to an engine that has proven to hold them: seconds and GB/s, part by part.

    python benchmarks/weight_sync.py [--json FILE] [--mib 256 1024] [--repeats 3] [--kind moe]

The engine is our local one in this process, so `load` is one engine's reading, fusing and checking. Memory bandwidth is
that of a copy, measured between the repeats (bytes read + bytes written). The lower bound of a sync through a file is
what must move once: write (read + write), load (read + write), checksums on both sides (read twice): 6 bytes a byte of
weights. `ratio:` is that bound over the measured time, for the largest size. The extrapolation to 61 GB is
proportional to bytes, on this machine's one process: no measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

BYTES_MOVED = 6
QWEN3_30B_A3B_BYTES = 61.06e9  # 30.53e9 parameters, bfloat16
NOT_AVAILABLE = {
    "nccl": "not written; it needs trainer and engine on GPUs of one communicator",
    "ipc": "not written; it needs trainer and engine on the same GPU",
}


@dataclass(frozen=True)
class Row:
    """One publish. gb_per_s: weights over all seconds; seconds_of: by part (SyncReport)."""

    num_bytes: int
    num_tensors: int
    seconds: float
    seconds_of: dict[str, float]
    gb_per_s: float
    copy_gb_per_s: float

    @property
    def bound_s(self) -> float:
        return BYTES_MOVED * self.num_bytes / (self.copy_gb_per_s * 1e9)


def write_model(folder: Path, mib: int, is_moe: bool) -> int:
    """A random Qwen3 (MoE) checkpoint of about so many MiB in bfloat16; returns the size of its vocabulary."""
    import torch

    from marsrl.rollout.model_shape import ModelShape
    from marsrl.trainer.megatron.mapping import hf_shapes, units
    from marsrl.trainer.weight_files import write_shards

    vocab_size, hidden, heads, experts = 4096, 512, 8, 32 if is_moe else 0
    ffn = 256 if is_moe else 1536
    layer = hidden * (hidden * 3 + 3 * ffn * max(experts, 1))
    layers = max(1, round(((mib << 20) / 2 - 2 * vocab_size * hidden) / layer))
    shape = ModelShape(
        "Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM", layers, hidden, heads, 4, 64, ffn, vocab_size, 4096,
        1e6, 1e-6, False, False, True, experts, 4 if is_moe else 0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def tensors():  # type: ignore[no-untyped-def]
        for unit in units(shape, 1):
            for name, size in zip(unit.hf, hf_shapes(shape, unit), strict=True):
                yield name, (torch.randn(size, generator=generator) * 0.02).bfloat16()

    write_shards(folder, tensors())
    config = {
        "architectures": [shape.architecture], "num_hidden_layers": layers, "hidden_size": hidden, "head_dim": 64,
        "num_attention_heads": heads, "num_key_value_heads": 4, "intermediate_size": ffn, "vocab_size": vocab_size,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": False,
    }  # fmt: skip
    if is_moe:
        config |= {
            "num_experts": experts, "num_experts_per_tok": 4, "moe_intermediate_size": ffn, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return vocab_size


def copy_gb_per_s(num_bytes: int = 256 << 20) -> float:
    """Bytes read and written a second by a copy that no cache holds, the best of three."""
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best / 1e9


def measure(mib: int, repeats: int, is_moe: bool) -> list[Row]:
    """Publishes of one model, the first one (page faults, lazy imports) left out."""
    from marsrl.rollout.engines.fused_layout import WeightFiles
    from marsrl.rollout.engines.local.engine import LocalEngine
    from marsrl.rollout.engines.pool import EnginePool, LocalReplicas
    from marsrl.trainer.weight_sync import ProbeScore, WeightSync

    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        vocab_size = write_model(Path(folder) / "model", mib, is_moe)
        files = WeightFiles(Path(folder) / "model")
        weights = {name: files[name].clone() for name in files}
        pool = EnginePool(LocalReplicas([LocalEngine(Path(folder) / "model", dtype="bfloat16", max_model_len=256)]))
        sync = WeightSync(pool, vocab_size=vocab_size, tolerance=1e9)
        for version in range(repeats + 1):
            trainer = [ProbeScore(scores, len(scores)) for scores in pool.score(sync.probe)[0]]
            # a clone a tensor: what the trainer's export costs where nothing is gathered from other ranks
            exported = ((name, tensor.clone()) for name, tensor in weights.items())
            report = sync.publish(exported, version, lambda _, scores=trainer: scores)  # type: ignore[misc]
            if version:
                speed = report.num_bytes / report.seconds / 1e9
                rows.append(
                    Row(
                        report.num_bytes,
                        report.num_tensors,
                        report.seconds,
                        dict(report.seconds_of),
                        speed,
                        copy_gb_per_s(),
                    )
                )
        sync.close()
        pool.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024], help="sizes of the weights, ascending")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=["moe", "dense"], default="moe")
    words = parser.parse_args()
    import torch

    from marsrl.kernels import library
    from marsrl.trainer.summarise_run import commit, device_name

    torch.set_num_threads(1)
    slow = library.why_no_cpu_library()
    print(f"shm, one thread, {words.kind}, bfloat16; checksums by {'csrc/cpu' if slow is None else f'torch ({slow})'}")
    for backend, reason in NOT_AVAILABLE.items():
        print(f"{backend}: not available: {reason}")
    rows: list[Row] = []
    for mib in words.mib:
        measured = measure(mib, words.repeats, words.kind == "moe")
        row = sorted(measured, key=lambda each: each.seconds)[len(measured) // 2]
        rows.append(row)
        spread = f"{min(each.seconds for each in measured):.3f} to {max(each.seconds for each in measured):.3f}"
        print(
            f"{row.num_bytes / 1e9:.3f} GB: {row.seconds:.3f} s ({spread}), {row.gb_per_s:.2f} GB/s; "
            f"a copy moves {row.copy_gb_per_s:.1f} GB/s, bound {row.bound_s:.3f} s"
        )
        for part, seconds in row.seconds_of.items():
            print(f"    {part:<16} {seconds:.3f} s  {row.num_bytes / seconds / 1e9:8.2f} GB/s of weights")
    last = rows[-1]
    ratio = last.bound_s / last.seconds
    at_61 = last.seconds * QWEN3_30B_A3B_BYTES / last.num_bytes
    print(
        f"extrapolation, not measured: 61 GB (Qwen3-30B-A3B, bfloat16) at the last size's rate, one process: {at_61:.0f} s"
    )
    if words.json:
        record = {
            "device": device_name(), "commit": commit(), "backend": "shm", "not_available": NOT_AVAILABLE,
            "rows": [asdict(row) | {"bound_s": row.bound_s} for row in rows], "extrapolated_61_gb_s": at_61, "ratio": ratio,
        }  # fmt: skip
        Path(words.json).write_text(json.dumps(record, indent=1))
    print(f"ratio: {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
