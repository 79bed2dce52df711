"""Fills Triton's cache: launches once, in processes side by side, what gpu_suite.py launches later one after the other.

    python benchmarks/fill_cache.py [--device cuda|cpu] [--quick] [--shape TEXT]

A launch compiles a kernel for exactly the arguments of the later one, which finds it by the same key, unless Triton's version,
the options or the GPU differ. The cases at the sizes that are timed; a launch that
fails is named, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from case import Shape
from cases import ORDER, load

MOST_WORKERS = 8
MEMORY_SHARE = 0.5  # of the GPU's memory, for all workers; the rest is for other processes


def launches(
    cases: Sequence[str], device: str, is_quick: bool, of_the_loss: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, what launches it), in the order in which the suite comes to them. of_the_loss: what a shape's title has, for
    linear_policy_loss."""
    for case in cases:
        for shape in load(case).shapes(device, is_quick):
            if case != "linear_policy_loss" or of_the_loss in shape.title():
                yield f"{case}, {shape.title()}", partial(run_ours, case, shape)


def run_ours(case: str, shape: Shape) -> None:
    """Each of our own variants once."""
    for variant in load(case).build(shape).variants:
        if variant.name.partition(",")[0] == "ours":
            variant()


def work(todo: Sequence[tuple[str, Callable[[], object]]], device: str, worker: int, workers: int) -> int:
    """Run every `workers`-th launch, from the `worker`-th on; returns the number of failures."""
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE / workers)
    mine, failed = todo[worker::workers], 0
    for name, launch in mine:
        try:
            launch()
            if device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # the suite's own part reports more; a failed launch fills nothing
            failed += 1
            print(f"failed: {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(f"worker {worker} of {workers}: {len(mine)} launches, {failed} failed", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument(
        "--shape", default="", metavar="TEXT", help="linear_policy_loss at the shapes whose title has it"
    )
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    if words.worker is not None:
        return (
            1 if work(list(launches(ORDER, words.device, words.quick, words.shape)), words.device, *words.worker) else 0
        )
    num = max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))
    again = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker"]
    workers = [subprocess.Popen([*again, str(worker), str(num)]) for worker in range(num)]
    return max([process.wait() != 0 for process in workers])


if __name__ == "__main__":
    sys.exit(main())
