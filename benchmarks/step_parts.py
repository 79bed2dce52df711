"""Measure the seconds of training steps by part, in a run of trainer/main.py.

    python benchmarks/step_parts.py [--json FILE] [--config FILE] [key.sub=value ...]    # arguments of trainer/main.py
    python benchmarks/step_parts.py --config examples/real_team/run.yaml run.steps=2 run.evaluate=false

Prints, for each part and per step, the number of calls, wall-clock seconds, and CPU seconds of the part's thread. If one part
calls another, the seconds of the inner part count only for the inner part. The first publish (before the first step) and
evaluations are left out.

Set rollout.engine=local and rollout.placement=local; engines in other processes are not measured. torch uses one thread, so the
thread's CPU seconds are complete. On a shared machine CPU seconds are reliable, but wall-clock seconds are not. The table is
printed before the last checkpoint is written.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import runpy
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from namespace import ROOT

PLACES = {
    "prefill": ("rollout.engines.local.engine", "LocalEngine._prefilled"),
    "decode": ("rollout.engines.local.engine", "LocalEngine._step"),
    "pack": ("trainer.data.packing", "pack"),
    "forward": ("trainer.learner.megatron.head", "PolicyModel.forward"),
    "backward": ("trainer.learner.megatron.passes", "Passes.forward_backward"),  # minus the forward passes inside
    "gradient norm": ("trainer.learner.megatron.optimizer", "Optimizer.grad_norms"),
    "gradient norms, adapters": ("trainer.learner.megatron.optimizer", "BankOptimizer.grad_norms"),
    "optimizer": ("trainer.learner.megatron.optimizer", "Optimizer.apply"),
    "optimizer, adapters": ("trainer.learner.megatron.optimizer", "BankOptimizer.apply"),
    "zero gradients": ("trainer.learner.megatron.optimizer", "Optimizer.zero_grad"),
    "zero gradients, adapters": ("trainer.learner.megatron.optimizer", "BankOptimizer.zero_grad"),
    "publish: probe, trainer": ("trainer.weights.sync", "trainer_scores"),
    "publish: probe, adapters": ("trainer.weights.sync", "scores_together"),
    "publish: probe, engine": ("rollout.engines.local.engine", "LocalEngine.score"),
    "publish: export": ("trainer.learner.megatron.convert", "Converter.export"),
    "publish: checksums": ("rollout.weights.checksum", "block_sum"),
    "publish: write": ("rollout.weights.files", "save_file"),
    "publish: load": ("rollout.engines.local.engine", "LocalEngine.update_weights"),
    "publish: load adapter": ("rollout.engines.local.engine", "LocalEngine.update_adapter"),
}
"""{part: (module of marsrl, function of the module)}."""

WITHIN = ("publish: probe, trainer", "publish: probe, adapters", "publish: probe, engine")
"""Parts whose seconds include the forward passes inside them."""


class Clocks:
    """Clocks of the parts of a step since start(), over all threads. While a nested part runs, the outer part does not count."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), threading.local()
        self.start()

    def start(self) -> None:
        # Calls, wall-clock seconds, CPU seconds.
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        self._began = time.perf_counter(), time.process_time()

    def whole(self) -> tuple[float, float]:
        """Return (seconds, CPU seconds) of the whole process since start()."""
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        stack: list[list[Any]] = self._open.__dict__.setdefault("stack", [])
        if any(frame[0] in WITHIN for frame in stack):
            yield
            return
        stack.append([name, 0.0, 0.0])  # name, then seconds and CPU seconds of the parts inside
        start = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            took = time.perf_counter() - start[0], time.thread_time() - start[1]
            _, *within = stack.pop()
            with self._lock:
                totals = self.seconds[name]
                totals[0] += 1
                for i in range(2):
                    totals[1 + i] += took[i] - within[i]
            if stack:
                for i in range(2):
                    stack[-1][1 + i] += took[i]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as this part; for a generator, the caller's time between yields does not count."""

        @functools.wraps(function)
        def timed(*words: Any, **options: Any) -> Any:
            with self.part(name):
                result = function(*words, **options)
            return self._each(name, result) if isinstance(result, Iterator) else result

        return timed

    def _each(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.part(name):
                item = next(items, self)
            if item is self:
                return
            yield item


def put_clocks(clocks: Clocks) -> None:
    """Wrap the functions of PLACES wherever marsrl's modules refer to them."""
    from importlib import import_module

    for name, (module_name, path) in PLACES.items():
        module = import_module(f"marsrl.{module_name}")
        owner, _, last = path.rpartition(".")
        if owner:
            owner_object = getattr(module, owner)
            setattr(owner_object, last, clocks.around(name, getattr(owner_object, last)))
            continue
        original = getattr(module, last)
        timed = clocks.around(name, original)
        for loaded in [value for key, value in sys.modules.items() if key.startswith("marsrl.")]:
            if getattr(loaded, last, None) is original:
                setattr(loaded, last, timed)


def table(clocks: Clocks, steps: int) -> dict[str, Any]:
    """Print the table, and return its numbers per step."""
    seconds, cpu = clocks.whole()
    rows = {name: tuple(number / steps for number in clocks.seconds[name]) for name in PLACES if name in clocks.seconds}
    remaining = [total / steps - sum(row[i] for row in rows.values()) for i, total in ((1, seconds), (2, cpu))]
    rows |= {"the rest": (0, *remaining), "all": (0, seconds / steps, cpu / steps)}
    print(f"\nper step, of {steps}          {'calls':>9}{'seconds':>10}{'CPU s':>9}{'share of CPU':>14}")
    for name, (calls, clock, of_cpu) in rows.items():
        print(f"  {name:26}{calls:>9.1f}{clock:>10.2f}{of_cpu:>9.2f}{of_cpu * steps / cpu:>14.1%}", flush=True)
    return {name: dict(zip(("calls", "seconds", "cpu_seconds"), row, strict=True)) for name, row in rows.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument("--config", help="configuration file, as for trainer/main.py")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value", help="settings, as for trainer/main.py")
    options = parser.parse_intermixed_args()
    trainer = [*(["--config", options.config] if options.config else []), *options.settings]
    os.environ["OMP_NUM_THREADS"] = "1"
    from record import surroundings

    from marsrl.trainer.learner.megatron import shim
    from marsrl.trainer.run import Run

    before = surroundings("cpu")
    shim.install()
    clocks, begin, record = Clocks(), Run.begin, Run.record
    put_clocks(clocks)

    def begin_and_start(self: Run) -> None:
        begin(self)
        clocks.start()

    def record_and_show(self: Run, step: int, batch: Any) -> None:
        record(self, step, batch)
        if step < self.config.run.steps:
            return
        result = {**before, "load_after": os.getloadavg()[0], "words": trainer}
        result |= {"steps": step - self.resumed_step, "parts": table(clocks, step - self.resumed_step)}
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")

    Run.begin, Run.record = begin_and_start, record_and_show  # type: ignore[method-assign]
    script = ROOT / "trainer" / "main.py"
    sys.argv = [str(script), *trainer, "trainer.threads=1", "rollout.threads=1"]
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
