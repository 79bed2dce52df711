"""Time of a call, measured on the CPU as process time of one thread, on a GPU by CUDA events with a flushed L2.

On a GPU the call is queued after a kernel that keeps the GPU busy while the host launches it, as in a training step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from case import Variant
from torch.profiler import ProfilerActivity, profile

SHORT_S = 0.01  # seconds for which a call is repeated on the CPU, because a single call of 50 us is mostly noise
FLUSH_BYTES = 256 * 2**20  # bytes, more than the L2 cache of any current GPU (50 MB on H100, 126 MB on B200)
AHEAD_CYCLES = 10_000_000  # GPU cycles, 5 ms: longer than Python takes to launch a call


class Clock:
    """Timer of one call of a variant. On the CPU the time is the mean of calls within SHORT_S seconds, with warm caches."""

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if self.is_cuda else None

    def seconds(self, variant: Variant) -> float:
        if self._flush is None:
            total, calls = 0.0, 0
            while total < SHORT_S:
                variant.prepare()
                start = time.process_time()
                variant.run()
                total += time.process_time() - start
                calls += 1
            return total / calls
        variant.prepare()
        self._flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        variant.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def interleave(
    variants: Sequence[Variant], clock: Clock, rounds: int, budget_s: float
) -> tuple[dict[str, tuple[float, ...]], dict[str, str]]:
    """Time each variant once per round, in rotating order; return (seconds per round by name, {failed variant: reason}).

    Drift of clocks and other load thus affect all variants alike, and cancel in their ratio. The first round is a warm-up. Once
    three rounds are done, no new round starts after budget_s of wall time.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    failed: dict[str, str] = {}
    start = time.monotonic()
    for turn in range(rounds + 1):
        if turn > 3 and time.monotonic() - start > budget_s:
            break
        at = turn % max(1, len(variants))
        for variant in [*variants[at:], *variants[:at]]:
            if variant.name in failed:
                continue
            try:
                elapsed = clock.seconds(variant)
            except torch.OutOfMemoryError as error:
                failed[variant.name] = f"out of memory: {str(error).splitlines()[0]}"
                torch.cuda.empty_cache()
                continue
            if turn:
                seconds[variant.name].append(elapsed)
    return {name: tuple(values) for name, values in seconds.items() if values}, failed


def host_seconds(variant: Variant, calls: int = 5) -> float:
    """Return the median time until the host has launched a call on an idle GPU, including waits inside the call."""
    seconds = []
    for _ in range(calls):
        variant.prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        variant.run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def top_kernels(
    run: Callable[[], object], *, is_cuda: bool, calls: int = 3, most: int = 15
) -> tuple[tuple[float, float, str], ...]:
    """Return (milliseconds and launches per call, name) of all kernels together and of the most expensive ones.

    On a CPU these are PyTorch's operators.
    """
    run()  # the first call compiles
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            run()
        if is_cuda:
            torch.cuda.synchronize()
    averages = profiler.key_averages()
    times = [
        (kernel.self_device_time_total if is_cuda else kernel.self_cpu_time_total, kernel.count, kernel.key)
        for kernel in averages
    ]
    times = sorted((kernel for kernel in times if kernel[0] > 0), reverse=True)  # calls on the host have no GPU time
    together = sum(us for us, *_ in times), sum(count for _, count, _ in times), "all together"
    return tuple((us / 1e3 / calls, count / calls, name) for us, count, name in (together, *times[:most]))
