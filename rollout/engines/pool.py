"""All replicas of one policy behind the interface of one engine.

    pool = make_pool(...)                                  # build.py
    results = pool.generate(requests, version=3, on_progress=bar.update)
    pool.update_weights(WeightUpdate(path, 4)); pool.close()

Requests of one affinity (one prompt, one group) stay on one replica, where their prefix is computed once; the costliest
affinities are dealt out first, each to the replica with the least work. Results come in the order of the requests.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from marsrl.rollout.engines.dispatch import Dispatcher, split_requests
from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Engine, EngineInfo, WeightReceipt, WeightUpdate
from marsrl.rollout.types import Finish, FloatArray, IntArray

_PROGRESS_S = 0.2
_SPAN_S, _PAUSE_S = 1.0, 0.05  # of decoding, in what a listener hears of
_SLICE_S = 0.05  # for which one of several engines of this process decodes before the next


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

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        """Hand requests to a replica, which may be decoding; does not wait for it."""

    def collect(self, busy: Sequence[int], timeout_s: float) -> list[tuple[int, Timed]]:
        """What has ended at the busy replicas: (replica, list of results), waiting timeout_s at most for the first."""

    def abort(self, busy: Sequence[int]) -> None:
        """Have every request of these replicas come back with the next results, as far as it got."""

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

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self.engines[replica].submit(requests, version=version)

    def collect(self, busy: Sequence[int], timeout_s: float) -> list[tuple[int, Timed]]:
        """Busy engines decode in turn, a slice of time each."""
        end = time.monotonic() + timeout_s
        while True:
            answers = []
            for replica in busy:
                left = max(0.0, end - time.monotonic())
                slice_s = left if len(busy) == 1 else min(left, _SLICE_S)
                engine = self.engines[replica]
                answers.append((replica, timed(functools.partial(engine.collect, slice_s))))
            if any(answer.value for _, answer in answers) or time.monotonic() >= end:
                return answers

    def abort(self, busy: Sequence[int]) -> None:
        for replica in busy:
            self.engines[replica].abort()

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
    """n replicas of one policy. Every method is called by one thread at a time; close() may be called twice.

        pool.submit(requests, version=3)          # at any time; dispatch.py says which replica gets what, and when
        results = pool.collect(timeout_s=0.2)     # what has ended meanwhile
        results = pool.drain()                    # all the rest, as far as it got; the replicas are idle then

    slots: requests that a replica gets at a time; None: all of them.
    deadline_s: a request that a replica has for longer is an error, by `clock` (seconds).
    on_call: may be set; told of every call that a replica has served (for trace.json).
    """

    def __init__(
        self,
        replicas: Replicas,
        name: str = "main",
        *,
        slots: int | None = None,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.on_call: OnCall | None = None
        self._replicas = replicas
        self._dispatch = Dispatcher(len(replicas), slots)
        self._deadline_s, self._clock = deadline_s, clock
        self._since: dict[str, float] = {}  # when a replica got each request; in this order
        self._version = 0  # of the requests that wait
        self._spans: dict[int, tuple[float, float]] = {}  # of collect, by replica: not told to the listener yet
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

    @property
    def num_under_way(self) -> int:
        """Requests submitted and not back yet."""
        return len(self._since) + self._dispatch.num_waiting

    def submit(self, requests: Sequence[DecodeRequest], *, version: int) -> None:
        """Queue requests and send those that a replica has room for."""
        self._version = version
        self._dispatch.add(requests)
        self._send()

    def collect(self, timeout_s: float) -> list[DecodeResult]:
        """Results that have come, waiting timeout_s at most for the first; freed slots are filled before it returns.

        Raises:
            TimeoutError: a replica has had a request for longer than deadline_s.
        """
        busy = self._dispatch.busy
        if not busy:
            return []
        results = [result for answer in self._heard(busy, timeout_s) for result in answer]
        for result in results:
            del self._since[result.uid]
            self._dispatch.end(result.uid)
        self._send()
        self._check_deadline()
        return results

    def drain(self) -> list[DecodeResult]:
        """End everything: results of all requests under way, UNFINISHED with the tokens there are."""
        none = np.zeros(0, np.int32)
        results = [
            DecodeResult(request.uid, none, none.astype(np.float32), Finish.UNFINISHED, self._version)
            for request in self._dispatch.drop_waiting()
        ]
        self._replicas.abort(self._dispatch.busy)
        while self._since:
            results += self.collect(_PROGRESS_S)
        for replica in list(self._spans):
            self._tell_span(replica)
        return results

    def score(self, sequences: Sequence[IntArray], temperature: float = 1.0) -> list[list[FloatArray]]:
        """What each replica makes of the same sequences: scores[replica][sequence], log-probs [N-1], nats."""
        return self._call("score", [(list(sequences), temperature)] * len(self._replicas))

    def update_weights(self, update: WeightUpdate | Sequence[WeightUpdate]) -> list[WeightReceipt]:
        """Give every replica the new weights, the same update or its own; returns when all of them hold them."""
        self._dispatch.forget_homes()  # engines drop their prefix caches
        updates = [update] * len(self._replicas) if isinstance(update, WeightUpdate) else update
        return self._call("update_weights", [(each,) for each in updates])

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

    def _heard(self, busy: Sequence[int], timeout_s: float) -> list[list[DecodeResult]]:
        answers = self._replicas.collect(busy, timeout_s)
        for replica, answer in answers:
            self._note_span(replica, answer.start, answer.end)
        return [answer.value for _, answer in answers]

    def _note_span(self, replica: int, start: float, end: float) -> None:
        """Calls of collect follow each other closely: the listener hears of a second of them, or a pause, as one."""
        first, last = self._spans.get(replica, (start, start))
        if start - last > _PAUSE_S or end - first > _SPAN_S:
            self._tell_span(replica)
            first = start
        self._spans[replica] = (first, end)

    def _tell_span(self, replica: int) -> None:
        if replica in self._spans and self.on_call is not None:
            self.on_call(replica, "collect", *self._spans[replica])
        self._spans.pop(replica, None)

    def _send(self) -> None:
        now = self._clock()
        for replica, requests in self._dispatch.take().items():
            self._since.update((request.uid, now) for request in requests)
            self._replicas.submit(replica, requests, self._version)

    def _check_deadline(self) -> None:
        uid, since = next(iter(self._since.items()), ("", 0.0))
        if uid and self._deadline_s is not None and self._clock() - since > self._deadline_s:
            raise TimeoutError(
                f"engines of policy {self.name}: request {uid} has not come back after rollout.deadline_s = "
                f"{self._deadline_s:g} s; raise it, or lower rollout.segment_length"
            )
