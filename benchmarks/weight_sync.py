"""Measure seconds and GB/s of a publish, from the trainer's tensors to a verified engine, by backend and part.

    python benchmarks/weight_sync.py [--json FILE] [--mib 64 256 1024] [--repeats 3] [--bucket-mib 64]
                                     [--changed 0.008 0.045 0.2]

The engine is our local engine in a separate process; both processes have one thread. Backends publish in turn. Without CUDA the
CPU twins are measured instead of the backends: gloo (TCP over loopback) for nccl, and a file in /dev/shm that both processes map
for ipc. Memory bandwidth is that of a copy (bytes read + bytes written), measured between the repeats.

Prints the seconds of each part, GB/s, and the share of the bound (bound / seconds). The bound of a backend is the time to move
the bytes that it must move, at the memory bandwidth. Bytes moved per byte of weights:

    shm   write 2, load 2, checksums on both sides 2                                                               = 6
    ipc   pack into the shared bucket 2, copy to the engine's tensor 2, checksums 2                                = 6
    nccl  pack 2, into the kernel 2, out of it 2, copy to the tensor 2, checksums 2 (gloo; NVLink moves it once)   = 10
    delta pack 2, compare 2, store what was sent 2, checksums 2, and 6 per byte sent                               = 8 +

delta is nccl's twin with sync.delta; --changed is the share of parameters that changed since the previous publish. With --mib 0
there are 18,867 tiny tensors, so the measured time is host time per tensor of the checkpoint, on both processes' CPUs. `ratio:`
is the share of the bound by shm at the largest size. The extrapolation to 61 GB is proportional to bytes and was not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

BYTES_MOVED = {"shm": 6, "ipc": 6, "nccl": 10, "delta": 8}
TWINS = {
    "shm": "shm",
    "ipc": "ipc's CPU twin (a mapped file)",
    "nccl": "nccl's CPU twin (gloo, loopback)",
    "delta": "nccl's CPU twin with sync.delta",
}
QWEN3_30B_A3B_BYTES = 61.06e9  # 30.53e9 parameters, bfloat16


@dataclass(frozen=True)
class Row:
    """Measured publish. num_bytes: size of the model. gb_per_s: num_bytes / seconds / 1e9. seconds_of: as in SyncReport.

    num_tensors: tensors of the checkpoint. cpu_s: CPU seconds of all threads of both processes.
    changed: share of the weights' numbers that had changed, if only changes were sent.
    """

    backend: str
    changed: float | None
    num_bytes: int
    sent_bytes: int
    num_tensors: int
    seconds: float
    cpu_s: float
    seconds_of: dict[str, float]
    gb_per_s: float
    copy_gb_per_s: float

    @property
    def bound_s(self) -> float:
        moved = BYTES_MOVED[self.backend] * self.num_bytes + (6 * self.sent_bytes if self.backend == "delta" else 0)
        return moved / (self.copy_gb_per_s * 1e9)

    @property
    def name(self) -> str:
        return TWINS[self.backend] + ("" if self.changed is None else f", {100 * self.changed:g}% changed")

    @property
    def share(self) -> float:
        """Share of the memory bandwidth that the publish uses: bound / seconds."""
        return self.bound_s / self.seconds


def write_model(folder: Path, mib: int) -> int:
    """Write a random Qwen3-MoE of about this many MiB in bfloat16; return the size of its vocabulary."""
    from marsrl.trainer.models.init_model import SMALL, init_model

    vocab_size, hidden, experts, width = 4096, 512, 32, 256
    of_layer = hidden * (hidden * 3 + 3 * width * experts)
    layers = max(1, round(((mib << 20) / 2 - 2 * vocab_size * hidden) / of_layer))
    if mib == 0:  # layers and experts as in Qwen3-30B-A3B
        vocab_size, hidden, layers, experts, width = 512, 16, 48, 128, 4
    shape = replace(
        SMALL, num_layers=layers, hidden_size=hidden, num_heads=8, num_kv_heads=4, head_size=64, ffn_size=width,
        vocab_size=vocab_size, num_experts=experts, experts_per_token=4,
    )  # fmt: skip
    init_model(shape, "bytes", folder, seed=0, dtype="bfloat16")
    return vocab_size


def copy_gb_per_s(num_bytes: int = 256 << 20) -> float:
    """Measure GB read and written per second by a copy larger than any cache; the best of three."""
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.ones_like(source)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best / 1e9


def cpu_s() -> float:
    """Return the CPU seconds of this process and the engine's so far."""
    import psutil

    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children()))


class Whole:
    """Stand-in for a learner and its Converter that holds a whole model on one rank."""

    sleeps = False

    def __init__(self, tensors: dict[str, Any], device: Any = None) -> None:
        """Hold these tensors, which are on `device` (None: the CPU)."""
        import torch

        from marsrl.rollout.weights.layout import box_of, stacked, whole_box

        self.device = device or torch.device("cpu")
        self.shapes = stacked({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        boxes = {name: whole_box(shape) for name, shape in self.shapes.items()}
        self.boxes_of_ranks = [boxes]
        self._stacks = {
            name: torch.empty(box.shape, dtype=torch.bfloat16, device=self.device) for name, box in boxes.items()
        }
        self._tensors = {}
        for name, tensor in tensors.items():
            stack, box = box_of(name, tensor.shape)
            self._tensors[name] = box.of(self._stacks[stack]).view(tensor.shape).copy_(tensor)

    def change(self, share: float) -> None:
        """Flip the last bit of a random share of the numbers of each tensor; each call chooses other numbers."""
        import torch

        for tensor in self._tensors.values():
            moves = torch.rand(tensor.shape, device=tensor.device) < share
            tensor.view(torch.int16).bitwise_xor_(moves.to(torch.int16))

    def export(self) -> Any:
        """Yield a clone of each tensor, which costs as much as the trainer's export if nothing is gathered from other ranks."""
        return ((name, tensor.clone()) for name, tensor in self._tensors.items())

    def held(self) -> Any:
        return self

    def stack(self, name: str) -> Any:
        return self._stacks[name]


def measure(mib: int, repeats: int, bucket_mib: int, shares: list[float]) -> list[Row]:
    """Publish one model by each backend in turn; first publishes, with page faults and lazy imports, are left out.

    shares: shares of the numbers that change, for publishes with sync.delta.
    """
    import torch
    from engine_process import EngineProcess

    from marsrl.rollout.pool.pool import EnginePool
    from marsrl.rollout.weights.files import WeightFiles
    from marsrl.trainer.weights.comparison import CheckedEngines
    from marsrl.trainer.weights.sync import DirectSync, FileSync, WeightSync

    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        model = Path(folder) / "model"
        vocab_size = write_model(model, mib)
        files = WeightFiles(model)
        weights = {name: files[name].clone() for name in files}
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        pool = EnginePool(EngineProcess(str(model), "bfloat16"))  # type: ignore[arg-type]
        engines, learner = CheckedEngines(pool, vocab_size=vocab_size), Whole(weights)
        common: dict[str, Any] = {"verify_every": repeats + 2, "bucket_bytes": bucket_mib << 20}
        ways: list[tuple[str, float | None]] = [("shm", None), ("ipc", None), ("nccl", None)]
        # One after the other, because an engine has one connection at a time.
        for backend, share in [*ways, *(("delta", share) for share in shares)]:
            sync: WeightSync
            if backend == "shm":
                sync = FileSync(engines, torch.bfloat16, verify_every=repeats + 2)
            else:
                kind: Literal["nccl", "ipc"] = "ipc" if backend == "ipc" else "nccl"
                sync = DirectSync(engines, torch.bfloat16, kind, sends_deltas=share is not None, **common)
            for version in range(1, repeats + 2):
                learner.change(share or 0.0)
                before = cpu_s()
                report = sync.publish(learner, version)  # type: ignore[arg-type]
                assert report is not None and report.comparison is None
                speed = num_bytes / report.seconds / 1e9
                row = Row(
                    backend, share, num_bytes, report.num_bytes, len(weights), report.seconds, cpu_s() - before,
                    dict(report.seconds_of), speed, copy_gb_per_s(),
                )  # fmt: skip
                rows += [row] if version > 1 else []
            sync.close()
        pool.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument(
        "--mib",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        help="sizes of the weights in MiB, ascending; 0: many tiny tensors",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--bucket-mib", type=int, default=64, help="size of a bucket, which ipc and nccl send at once, MiB"
    )
    parser.add_argument(
        "--changed",
        type=float,
        nargs="*",
        default=[0.008, 0.045, 0.2],
        help="shares of the parameters that change, for sync.delta",
    )
    options = parser.parse_args()
    import torch

    from marsrl.kernels import library
    from marsrl.trainer.machine import commit, device_name

    torch.set_num_threads(1)
    slow = library.why_no_cpu_library()
    print(f"Qwen3-MoE, bfloat16, one thread each; checksums by {'csrc/cpu' if slow is None else f'torch ({slow})'}")
    medians: list[Row] = []
    for mib in options.mib:
        measured = measure(mib, options.repeats, options.bucket_mib, options.changed)
        for name in dict.fromkeys(row.name for row in measured):
            rows = sorted((row for row in measured if row.name == name), key=lambda row: row.seconds)
            row = rows[len(rows) // 2]
            medians.append(row)
            print(
                f"{row.num_bytes / 1e9:.3f} GB by {name}, {row.sent_bytes / 1e9:.3f} GB sent: {row.seconds:.3f} s "
                f"({rows[0].seconds:.3f} to {rows[-1].seconds:.3f}), {row.gb_per_s:.2f} GB/s; "
                f"a copy moves {row.copy_gb_per_s:.1f} GB/s, "
                f"bound {row.bound_s:.3f} s: {100 * row.share:.0f}% of the memory's bandwidth; "
                f"{1e6 * row.cpu_s / row.num_tensors:.1f} us of CPU time a tensor"
            )
            for part, seconds in row.seconds_of.items():
                print(f"    {part:<16} {seconds:.3f} s  {row.num_bytes / seconds / 1e9:8.2f} GB/s of weights")
    last = {row.backend: row for row in medians if row.changed is None}
    at_61 = {backend: row.seconds * QWEN3_30B_A3B_BYTES / row.num_bytes for backend, row in last.items()}
    print(
        "extrapolation, not measured: 61 GB (Qwen3-30B-A3B, bfloat16) at the last size's rate, one process: "
        + ", ".join(f"{backend} {seconds:.0f} s" for backend, seconds in at_61.items())
    )
    ratio = last["shm"].share
    if options.json:
        record = {
            "device": device_name(), "commit": commit(), "bucket_mib": options.bucket_mib, "measured": TWINS,
            "not_run": "nccl and ipc between GPUs",
            "rows": [asdict(row) | {"bound_s": row.bound_s, "share_of_bandwidth": row.share} for row in medians],
            "extrapolated_61_gb_s": at_61, "ratio": ratio,
        }  # fmt: skip
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    print(f"ratio: {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
