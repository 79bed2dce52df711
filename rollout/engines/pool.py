"""All replicas of one policy behind the interface of one engine.

    pool = make_pool(...)                                  # build.py
    results = pool.generate(requests, version=3, on_progress=bar.update)
    pool.update_weights(WeightUpdate(path, 4)); pool.close()

Requests of one affinity (one prompt, one group) stay on one replica, where their prefix is computed once; the costliest
affinities are dealt out first, each to the replica with the least work. Results come in the order of the requests.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine, EngineInfo, WeightReceipt, WeightUpdate
from marsrl.rollout.types import FloatArray, IntArray

PREFILL_COST = 0.1
"""Work of a prompt token over that of a decoded one, in balancing replicas; decoding is bound by memory, "
"prefill is not."""

_PROGRESS_S = 0.2


@dataclass(frozen=True, slots=True)
class Timed:
    """What an engine's method returned, and when it ran there. start, end: time.time() of the engine's process."""

    value: Any
    start: float
    end: float


OnCall = Callable[[int, str, float, float], None]
"""Told (replica, method, start, end) of every call that an engine served; times as in Timed."""


def timed(function: Callable[[], Any]) -> Timed:
    """Call it and take the time."""
    start = time.time()
    value = function()
    return Timed(value, start, max(start, time.time()))  # the wall clock may be set back


class Replicas(Protocol):
    """How the pool reaches its engines: in this process, or as Ray actors (ray_cluster.py)."""

    def __len__(self) -> int: ...

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Timed]:
        """method(*arguments[i]) on replica i, all at once where they can; results by replica."""

    def num_decoded(self) -> list[int]: ...

    def close(self) -> None: ...


class LocalReplicas:
    """Engines in this process, called one after the other."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def __len__(self) -> int:
        return len(self.engines)

    def call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Timed]:
        if on_wait is None:
            return [_invoke(engine, method, args) for engine, args in zip(self.engines, arguments, strict=True)]
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_PROGRESS_S):
                on_wait()

        watcher = threading.Thread(target=watch, name="marsrl-progress", daemon=True)
        watcher.start()
        try:
            return [_invoke(engine, method, args) for engine, args in zip(self.engines, arguments, strict=True)]
        finally:
            done.set()
            watcher.join()

    def num_decoded(self) -> list[int]:
        return [engine.num_decoded() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()


def _invoke(engine: Engine, method: str, args: tuple[Any, ...]) -> Timed:
    if method == "generate":
        return timed(lambda: engine.generate(args[0], version=args[1]))
    return timed(lambda: getattr(engine, method)(*args))


class EnginePool:
    """n replicas of one policy. Every method is called by one thread; close() may be called twice.

    on_call: may be set; told of every call that a replica has served (for trace.json).
    """

    def __init__(self, replicas: Replicas, name: str = "main") -> None:
        self.name = name
        self.on_call: OnCall | None = None
        self._replicas = replicas
        self._is_closed = False

    def __enter__(self) -> EnginePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def num_engines(self) -> int:
        return len(self._replicas)

    def infos(self) -> list[EngineInfo]:
        return self._call("info", [()] * len(self._replicas))

    def num_decoded(self) -> list[int]:
        """Tokens decoded since the start, by replica."""
        return self._replicas.num_decoded()

    def generate(
        self, requests: Sequence[DecodeRequest], *, version: int, on_progress: Callable[[int], None] | None = None
    ) -> list[DecodeResult]:
        """Decode all requests on all replicas; on_progress gets the tokens decoded so far by this call."""
        shares = split_requests(requests, len(self._replicas))
        before = sum(self.num_decoded())

        def report() -> None:
            if on_progress is not None:
                on_progress(sum(self.num_decoded()) - before)

        answers = self._call(
            "generate",
            [([requests[i] for i in share], version) for share in shares],
            None if on_progress is None else report,
        )
        report()
        results: list[DecodeResult | None] = [None] * len(requests)
        for share, answer in zip(shares, answers, strict=True):
            for i, result in zip(share, answer, strict=True):
                results[i] = result
        return [result for result in results if result is not None]

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[list[FloatArray]]:
        """What each replica makes of the same sequences: scores[replica][sequence], log-probs [N-1], nats."""
        return self._call("score", [(list(sequences), temperature)] * len(self._replicas))

    def update_weights(self, update: WeightUpdate) -> list[WeightReceipt]:
        """Give every replica the new weights; returns when all of them hold them."""
        return self._call("update_weights", [(update,)] * len(self._replicas))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._replicas.close()

    def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], on_wait: Callable[[], None] | None = None
    ) -> list[Any]:
        answers = self._replicas.call(method, arguments, on_wait)
        if self.on_call is not None:
            for replica, answer in enumerate(answers):
                self.on_call(replica, method, answer.start, answer.end)
        return [answer.value for answer in answers]


def split_requests(requests: Sequence[DecodeRequest], num_replicas: int) -> list[list[int]]:
    """Indices of the requests that each replica gets: affinities whole, costliest first to the least loaded."""
    if num_replicas == 1:
        return [list(range(len(requests)))]
    members: dict[str, list[int]] = defaultdict(list)
    for i, request in enumerate(requests):
        members[request.affinity].append(i)
    cost = {key: sum(_cost(requests[i]) for i in group) for key, group in members.items()}
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    load = [0.0] * num_replicas
    for key in sorted(members, key=lambda key: (-cost[key], members[key][0])):
        replica = min(range(num_replicas), key=lambda r: (load[r], r))
        shares[replica] += members[key]
        load[replica] += cost[key]
    return [sorted(share) for share in shares]


def _cost(request: DecodeRequest) -> float:
    return request.max_new_tokens + PREFILL_COST * len(request.token_ids)
