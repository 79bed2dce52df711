"""A pool's way to its engines: the interface of a policy's replicas, and the replicas of this process.

    pool = EnginePool(LocalReplicas([engine]))

The replicas that are Ray actors are in ray_actors.py. A call returns, for each replica, what the engine returned and
when it ran (Timed), or that the engine is lost (Lost).
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

_SLICE_S = 0.05  # for which one of several engines of this process decodes before the next


OnLost = Callable[[int, str], None]
"""Told (replica, reason)."""


def ignore_loss(replica: int, reason: str) -> None:
    """Nobody waits for what only the lost engine could do."""


@dataclass(frozen=True, slots=True)
class Timed:
    """The result of an engine's method, and when it ran there. start, end: time.time() of the engine's process."""

    value: Any
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of an engine's answer: it will not give any. reason: for people."""

    reason: str


def timed(function: Callable[[], Any]) -> Timed:
    """Call it and take the time."""
    start = time.time()
    value = function()
    return Timed(value, start, max(start, time.time()))  # the wall clock may be set back


class Replicas(ABC):
    """The engines of one policy, numbered from 0. A number may have no engine: it was stopped, or waits for a place.

    can_restart: False where engines live in this process: what ails them ails it too, and none is ever Lost.
    takes: resources that each engine takes of one host, by Ray's names; empty: there is always room.
    """

    can_restart = False
    takes: Mapping[str, float] = MappingProxyType({})

    @abstractmethod
    def __len__(self) -> int:
        """Numbers that have had an engine."""

    @abstractmethod
    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        """method(*arguments[i]) on each replica i that has arguments, all at once where they can. on_lost: is told of a
        lost one at once, while others are still waited for."""

    def restart(self, replica: int) -> Lost | None:
        """End what is left of an engine and make a new one, with the weights of its start. Lost: that failed too.

        The number may be the next one, that of an engine more.
        """
        raise NotImplementedError

    def stop(self, replica: int) -> None:
        """End what is left of an engine; its place is free."""
        raise NotImplementedError

    def has_place(self, within_s: float) -> bool:
        """True if there is room for one engine more, at the latest in within_s."""
        return False

    @abstractmethod
    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        """Hand requests to a replica, which may be decoding; does not wait for it."""

    @abstractmethod
    def collect(
        self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True
    ) -> Sequence[tuple[int, Timed | Lost]]:
        """Results of the busy replicas: (replica, list of results), waiting timeout_s at most for the first.

        is_urgent: something may follow from a result. Else it is handed over whenever that costs least.
        """

    @abstractmethod
    def abort(self, busy: Sequence[int]) -> None:
        """Have every request of these replicas come back with the next results, as far as it got."""

    @abstractmethod
    def num_decoded(self) -> list[int]: ...

    @abstractmethod
    def close(self) -> None: ...


def call_one(replicas: Replicas, replica: int, method: str, arguments: tuple[Any, ...]) -> Timed | Lost:
    """method(*arguments) on one replica."""
    return replicas.call(method, {replica: arguments})[replica]


class LocalReplicas(Replicas):
    """Engines in this process, called one after the other. What they raise is raised: nothing is restarted."""

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
