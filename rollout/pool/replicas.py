"""Interface between a pool and its engines, and its implementation for engines of this process.

    pool = EnginePool(LocalReplicas([engine]))

Replicas as Ray actors are in ray_actors.py. A call returns, for each replica, the engine's result and
its times (Timed), or Lost.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from marsrl.rollout.engines.protocol import DecodeRequest, Engine

_SLICE_S = 0.05  # time slice of each engine of this process

OnLost = Callable[[int, str], None]
"""Called with (replica, reason) of a lost engine."""


def ignore_loss(replica: int, reason: str) -> None:
    """Default on_lost: nothing waits for the lost engine."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Result of an engine's method. start, end: time of the call, by time.time() in the engine's process."""

    value: Any
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Answer of a lost engine. reason: for messages."""

    reason: str


def timed(function: Callable[[], Any]) -> Timed:
    """Call the function and record when it starts and ends."""
    start = time.time()
    return Timed(function(), start, time.time())


class Replicas(ABC):
    """The engines of one policy, numbered from 0. A number has no engine while its engine is stopped or waits for room.

    can_restart: False for engines in this process, which die with it, so that none is ever Lost.
    takes: resources of one host that each engine takes, by Ray's names; empty: there is always room.
    """

    can_restart = False
    takes: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """Number of replicas, including those without an engine now."""

    @abstractmethod
    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        """Call method(*arguments[i]) on each replica i in `arguments`, concurrently if possible.

        on_lost: called as soon as a replica is lost, even before the others have answered.
        """

    def restart(self, replica: int) -> Lost | None:
        """Kill what remains of an engine, and start a new one with initial weights; Lost if the start fails.

        If `replica` is the number after the last one, an engine is added.
        """
        raise NotImplementedError

    def stop(self, replica: int) -> None:
        """Kill what remains of an engine, which frees its resources."""
        raise NotImplementedError

    def has_place(self, within_s: float) -> bool:
        """Return True if there is room for one more engine within within_s."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        """Send requests to a replica, which may be decoding, without waiting."""

    @abstractmethod
    def collect(
        self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True
    ) -> Sequence[tuple[int, Timed | Lost]]:
        """Return results of busy replicas: (replica, list of results), waiting at most timeout_s for the first.

        is_urgent: True if a result may trigger further requests; False to return results when that is cheapest.
        """

    @abstractmethod
    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        """Stop requests that use the adapter (None: all); these replicas return them, with their tokens, in the next results."""

    @abstractmethod
    def num_decoded(self, within_s: float) -> list[int]:
        """Return the number of tokens decoded so far, by replica; the last known number if a replica does not answer within_s."""

    @abstractmethod
    def close(self) -> None:
        """End the engines; may be called twice."""


def call_one(replicas: Replicas, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed | Lost:
    return replicas.call(method, {replica: arguments})[replica]


class LocalReplicas(Replicas):
    """Engines in this process, called one after the other. Their errors propagate: nothing is restarted."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)

    def __len__(self) -> int:
        return len(self.engines)

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        return {
            replica: timed(functools.partial(getattr(self.engines[replica], method), *each))
            for replica, each in arguments.items()
        }

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self.engines[replica].submit(requests, version=version)

    def collect(
        self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True
    ) -> Sequence[tuple[int, Timed | Lost]]:
        """Let busy engines decode in turn, a time slice each."""
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

    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        for replica in busy:
            self.engines[replica].abort(adapter)

    def num_decoded(self, within_s: float) -> list[int]:
        return [engine.num_decoded() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        self.engines.clear()
