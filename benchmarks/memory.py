"""Peak memory of one call beyond the memory allocated before the call.

On a GPU the peak is read from torch's allocator. On the CPU each variant runs in a separate process, and the peak is Linux's
VmHWM, which is reset (/proc/self/clear_refs) once the inputs exist and a first call has ended.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from case import Shape, Variant

CHILD_LIMIT_S = 600


class PeakMemory:
    """Peak bytes beyond those held when this object was created: torch's allocations on a GPU, resident memory otherwise."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def extra_bytes(self) -> int:
        if self._is_cuda:
            return torch.cuda.max_memory_allocated() - self._before
        # VmHWM, because getrusage's maximum is inherited from the parent process.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")) - self._before


def of_call_on_gpu(run: Callable[[], Any]) -> int:
    """Return the peak bytes of a call, including the results that `run` returns."""
    gc.collect()
    torch.cuda.empty_cache()
    peak = PeakMemory(is_cuda=True)
    results = run()
    torch.cuda.synchronize()
    extra = peak.extra_bytes()
    del results
    return extra


def of_variants_on_cpu(case: str, shape: Shape, names: list[str]) -> dict[str, int]:
    """Return the peak bytes of the variants that do not fail, measured in a child process that forks once per variant."""
    command = [sys.executable, str(Path(__file__).resolve()), case, json.dumps(dataclasses.asdict(shape)), *names]
    completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHILD_LIMIT_S, check=True)
    return dict(json.loads(line) for line in completed.stdout.splitlines() if line.startswith("["))


def _child(case_name: str, shape_json: str, *names: str) -> int:
    from cases import load

    torch.set_num_threads(1)
    bench = load(case_name).build(Shape(**json.loads(shape_json)))
    for variant in bench.variants:
        if variant.name in names and os.fork() == 0:
            try:
                print(json.dumps([variant.name, _measure(variant)]), flush=True)
            finally:
                os._exit(0)  # a variant that fails has no line
        elif variant.name in names:
            os.wait()
    return 0


def _measure(variant: Variant) -> int:
    # The first call compiles, and allocates the libraries' internal buffers. It runs in a separate thread, so that the measured
    # call allocates the buffers that a variant keeps per thread, and these are counted.
    first = threading.Thread(target=variant)
    first.start()
    first.join()
    variant.prepare()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise memory that the heap retained would not be counted
    peak = PeakMemory(is_cuda=False)
    results = variant.run()
    extra = peak.extra_bytes()
    del results
    return extra


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))
