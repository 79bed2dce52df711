"""Which device kernels the fused loss spends its time in, by torch's profiler.

python benchmarks/profile_top.py [--device cuda] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from case import Shape
from cases import load
from torch.profiler import ProfilerActivity, profile

CALLS = 3
TOP = 15


@dataclass(frozen=True)
class KernelTime:
    """Time of one kernel (or CPU operator) in a call of the op: milliseconds, share of all, number of launches."""

    name: str
    milliseconds: float
    share: float
    launches: float


def top_kernels(shape: Shape) -> list[KernelTime]:
    """The TOP entries of forward and backward of linear_policy_loss, largest first."""
    ours = next(each for each in load("linear_policy_loss").build(shape).variants if each.name == "ours")
    ours.run()  # compiles
    is_cuda = shape.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(CALLS):
            ours.run()
        if is_cuda:
            torch.cuda.synchronize()
    times = [
        (e.key, e.self_device_time_total if is_cuda else e.self_cpu_time_total, e.count) for e in seen.key_averages()
    ]
    total = sum(microseconds for _, microseconds, _ in times) or 1.0
    times.sort(key=lambda each: -each[1])
    return [
        KernelTime(name, microseconds / 1e3 / CALLS, microseconds / total, count / CALLS)
        for name, microseconds, count in times[:TOP]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    shapes = load("linear_policy_loss").shapes(words.device, words.quick)
    # the middle size, with all rows active and with half of them masked
    tokens = sorted({shape.tokens for shape in shapes})[len({shape.tokens for shape in shapes}) // 2]
    record = []
    for shape in shapes:
        if shape.tokens != tokens or shape.note:
            continue
        rows = top_kernels(shape)
        print(f"linear_policy_loss: {shape.title()}")
        for row in rows:
            print(f"  {row.milliseconds:10.3f} ms {row.share:6.1%} {row.launches:7.1f}x  {row.name[:100]}")
        record.append({"shape": shape.title(), "kernels": [dataclasses.asdict(row) for row in rows]})
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
