"""How many rows of logits and of their gradients the fused loss should hold at a time, measured on this device.

python benchmarks/dz_rows.py [--device cuda|cpu] [--quick] [--json FILE]

More rows of logits are better GEMMs and a longer wait before the first gradient; more rows of dz are fewer passes over a
float32 dW. Both cost memory. The row with `default` is what the fused loss does where nobody asks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import memory
import torch
from case import Results, Shape, Variant
from cases import load
from timing import Clock, interleave

from marsrl.kernels.head import chunked_head
from marsrl.kernels.head.host_memory import HostBudget

ROUNDS, BUDGET_S = 5, 25.0
# (rows of logits, chunks of them whose dz wait for one pair of backward GEMMs). 4,224 rows are 33 tiles of 128: at H = 2048
# dX has 264 tiles, two whole waves of a GPU with 132 multiprocessors.
DEVICE_SETTINGS = (
    (384, 8), (384, 11), (768, 1), (768, 2), (768, 4), (768, 6), (1024, 4), (1408, 1), (1408, 3), (1536, 2), (2048, 2),
    (4224, 1),
)  # fmt: skip
HOST_SETTINGS = ((16, 1), (32, 1), (64, 1), (128, 1), (256, 1))  # there dz takes the place of the logits


def with_rows(run: Callable[[], Results], shape: Shape, rows: int, chunks: int) -> Callable[[], Results]:
    """The same call with so many rows of logits, and of dz `chunks` times as many."""
    names = ("HOST", "DEVICE_LOGITS_BYTES", "DEVICE_GRADIENT_BYTES", "whole_waves")
    num_bytes = 4 * shape.vocab * rows
    itemsize = 2 if shape.dtype == "bfloat16" else 4
    values = (
        HostBudget(num_bytes, 1, num_bytes), num_bytes, itemsize * shape.vocab * rows * chunks, lambda at_most, *_: at_most,
    )  # fmt: skip

    def changed() -> Results:
        before = {name: getattr(chunked_head, name) for name in names}
        vars(chunked_head).update(zip(names, values))
        try:
            return run()
        finally:
            vars(chunked_head).update(before)

    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    is_cuda = words.device == "cuda"
    shapes = [each for each in load("linear_policy_loss").shapes(words.device, words.quick) if each.mask_share == 1]
    shape = next((each for each in shapes if each.tokens == 16384 and not each.note), shapes[-1])
    shape = replace(shape, dtype="bfloat16" if is_cuda else "float32")
    ours = next(each for each in load("linear_policy_loss").build(shape).variants if each.name == "ours")
    settings = DEVICE_SETTINGS if is_cuda else HOST_SETTINGS
    every = {"default": ours.run} | {f"{r} x {n}": with_rows(ours.run, shape, r, n) for r, n in settings}
    variants = [Variant(name, run, prepare=ours.prepare) for name, run in every.items()]
    times, failed = interleave(variants, Clock(words.device), 1 if words.quick else ROUNDS, BUDGET_S)
    print(f"linear_policy_loss: {shape.title()}; rows of logits x chunks whose dz wait")
    record = []
    for variant in variants:
        if variant.name in failed:
            print(f"  {variant.name:>10}  {failed[variant.name]}")
            continue
        each, extra = times[variant.name], None
        if is_cuda:
            ours.prepare and ours.prepare()
            extra = memory.of_call_on_gpu(variant.run)
        record.append({"rows": variant.name, "median_s": each.median, "spread": each.spread, "peak_bytes": extra})
        mebibytes = "" if extra is None else f"{extra / 2**20:10,.0f} MiB"
        print(f"  {variant.name:>10}{each.median * 1e3:12.3f} ms{each.spread:7.0%}{mebibytes}")
    if words.json:
        words.json.write_text(json.dumps({"shape": shape.title(), "dz_rows": record}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
