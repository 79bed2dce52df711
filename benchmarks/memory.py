"""Peak memory of one call beyond what was allocated before it.

On a GPU by torch's allocator. On the CPU each variant runs in a separate process, by the kernel's VmHWM, which is reset after
inputs and a first call (/proc/self/clear_refs).
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

from case import Shape, Variant

CHILD_LIMIT_S = 600


def of_call_on_gpu(run: Callable[[], Any]) -> int:
    """Bytes; the results that `run` returns are included."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak


def of_variants_on_cpu(case: str, shape: Shape, names: list[str]) -> dict[str, int] | str:
    """Bytes by variant, or the reason why unknown; measured in a child that forks once for each variant."""
    words = [sys.executable, str(Path(__file__).resolve()), case, json.dumps(dataclasses.asdict(shape)), *names]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=CHILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {CHILD_LIMIT_S} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes() -> int:
    """VmHWM. Not getrusage: its maximum is inherited from the process that started this one."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _child(case_name: str, shape_json: str, *names: str) -> int:
    import torch
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
    # The first call compiles, and fills the libraries' own buffers. It has a thread of its own: what a variant keeps
    # for its thread is allocated again, and counted.
    first = threading.Thread(target=variant)
    first.start()
    first.join()
    variant.prepare()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the heap retained would be reused unnoticed
    standing = rss_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    results = variant.run()
    extra = peak_rss_bytes() - standing
    del results
    return extra


if __name__ == "__main__":
    sys.exit(_child(*sys.argv[1:]))
