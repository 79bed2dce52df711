"""An engine in a process of its own, without Ray: what benchmarks send weights to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

Make = Callable[[str, str], Any]
"""(model_dir, dtype) -> an engine; called in its process."""


def local_engine(model_dir: str, dtype: str) -> Any:
    import torch

    from marsrl.rollout.engines.local.engine import LocalEngine

    torch.set_num_threads(1)
    return LocalEngine(model_dir, dtype=dtype, max_model_len=256)


def _serve(connection: Connection, make: Make, model_dir: str, dtype: str) -> None:
    """The child: calls the engine's methods until the other end closes."""
    from marsrl.rollout.pool.replicas import timed

    engine = make(model_dir, dtype)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer: Any = timed(partial(getattr(engine, method), *args))
        except Exception as error:  # raised by the parent
            answer = error
        connection.send(answer)


class EngineProcess:
    """One engine, as the pool wants its replicas; only what a weight sync calls."""

    def __init__(
        self, model_dir: str, dtype: str, make: Make = local_engine, start: Literal["fork", "spawn"] = "fork"
    ) -> None:
        # forked: the child has this checkout's modules, wherever they were imported from
        context = multiprocessing.get_context(start)
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, model_dir, dtype), daemon=True)  # type: ignore[attr-defined]
        self._process.start()
        theirs.close()

    def __len__(self) -> int:
        return 1

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]] | Mapping[int, tuple[Any, ...]], on_lost: object = None
    ) -> dict[int, Any]:
        """As pool.Replicas; on_lost is of no use: where the process ends, that is raised."""
        self._connection.send((method, arguments[0]))
        while not self._connection.poll(1.0):
            if not self._process.is_alive():
                raise RuntimeError(f"the engine's process has ended ({self._process.exitcode}) in {method}")
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return {0: answer}

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
