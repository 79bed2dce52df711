"""Engine in a separate process, without Ray, for benchmarks of weight syncs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Literal

Make = Callable[[str, str], Any]
"""Function of (model_dir, dtype) that returns an engine; called in the engine's process."""

_engines: list[Any] = []  # holds a single engine, in the child process


def local_engine(model_dir: str, dtype: str) -> Any:
    from marsrl.rollout.engines.local.engine import LocalEngine
    from marsrl.rollout.engines.protocol import EngineSpec

    return LocalEngine(EngineSpec("local", model_dir, dtype, 256))


def _begin(make: Make, model_dir: str, dtype: str) -> None:
    _engines.append(make(model_dir, dtype))


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    from marsrl.rollout.pool.replicas import timed

    return timed(partial(getattr(_engines[0], method), *arguments))


class EngineProcess:
    """One engine in a child process, with the methods of pool.Replicas that a weight sync calls."""

    def __init__(
        self, model_dir: str, dtype: str, make: Make = local_engine, start: Literal["fork", "spawn"] = "fork"
    ) -> None:
        # A forked child uses this checkout's modules, even if another marsrl is installed.
        context = multiprocessing.get_context(start)
        self._process = ProcessPoolExecutor(1, context, _begin, (make, model_dir, dtype))

    def __len__(self) -> int:
        return 1

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | Mapping[int, tuple[Any, ...]], on_lost: object = None
    ) -> dict[int, Any]:
        """Call a method of the engine, like pool.Replicas. on_lost is unused: if the process exits, this raises."""
        return {0: self._process.submit(_call, method, arguments[0]).result()}

    def close(self) -> None:
        self._process.shutdown()
