"""Engines in this process that can fail: they die, hang, or fail at a certain request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from letters import PROMPT_ENDS, WeighedEngine, completion, script

from marsrl.rollout.engines.protocol import DecodeRequest, DecodeResult, Sampling
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import LocalReplicas, Lost, OnLost, Timed, ignore_loss
from marsrl.rollout.types import Finish


@dataclass
class Places:
    """Number of places for engines on the available hosts."""

    free: int = 0


class MortalReplicas(LocalReplicas):
    """Replicas that fail as Ray actors do.

    deadly: function of a request; if it returns True, the replica with the request dies once it has decoded something. dead,
    hung: replicas that have died or hang; tests may add replicas at any time, and a restart removes one. The clock advances while
    a replica hangs. seconds: engine time of each result. places: places for new replicas, which pools can share; None: no limit.
    """

    can_restart = True

    def __init__(
        self,
        count: int = 1,
        *,
        deadly: Callable[[DecodeRequest], bool] = lambda request: False,
        script: Callable[[DecodeRequest], list[int]] = script,
        tokens_per_step: int | None = 9,
        adapters: Sequence[str] = (),
    ) -> None:
        self.places: Places | None = None
        self._make = lambda: WeighedEngine(script, tokens_per_step=tokens_per_step, adapters=adapters)
        super().__init__([self._make() for _ in range(count)])
        self.deadly = deadly
        self.dead: set[int] = set()
        self.hung: set[int] = set()
        self.doomed: set[int] = set()  # replicas that die after their next step
        self.had: list[list[str]] = [[] for _ in range(count)]  # uids of all requests, by replica
        self.restarts: list[int] = []
        self.is_beyond_repair = False
        self.now = self.seconds = 0.0

    def pool(self, **options: Any) -> EnginePool:
        return EnginePool(self, deadline_s=10.0, clock=lambda: self.now, **options)

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        serving = {replica: each for replica, each in arguments.items() if not self._lost(replica)}
        lost = {replica: reason for replica in arguments if (reason := self._lost(replica))}
        for replica, each in lost.items():
            on_lost(replica, each.reason)
        return {**super().call(method, serving), **lost}

    def submit(self, replica: int, requests: Sequence[DecodeRequest], version: int) -> None:
        self.had[replica] += [request.uid for request in requests]
        if any(map(self.deadly, requests)):
            self.doomed.add(replica)
        if not self._lost(replica):
            super().submit(replica, requests, version)

    def collect(
        self, busy: Sequence[int], timeout_s: float, *, is_urgent: bool = True
    ) -> Sequence[tuple[int, Timed | Lost]]:
        lost = [(replica, reason) for replica in busy if (reason := self._lost(replica))]
        answers = (
            super().collect([r for r in busy if r not in self.dead | self.hung], 0.0) if len(lost) < len(busy) else []
        )
        for _, answer in answers:
            answer.value[:] = [replace(result, seconds=self.seconds) for result in answer.value]
        self.now += 0.4 * bool(self.hung)
        self.dead |= self.doomed
        self.doomed.clear()
        return [*answers, *((replica, reason) for replica, reason in lost if replica in self.dead)]

    def abort(self, busy: Sequence[int], adapter: str | None = None) -> None:
        super().abort([replica for replica in busy if not self._lost(replica)], adapter)

    def stop(self, replica: int) -> None:
        """Stop the replica. Its place becomes free unless its host is gone too."""
        if self.places is not None and replica not in self.dead:
            self.places.free += 1
        self.dead.add(replica)

    def has_place(self, within_s: float) -> bool:
        """Return True if a place is free; otherwise the clock advances by within_s."""
        is_free = self.places is None or self.places.free > 0
        self.now += 0.0 if is_free else within_s
        return is_free

    def restart(self, replica: int) -> Lost | None:
        self.restarts.append(replica)
        if not self.has_place(0.0):
            raise RuntimeError(f"engine {replica} has no place")
        if self.places is not None:
            self.places.free -= 1
        self.dead.discard(replica)
        if self.is_beyond_repair:
            return Lost("no such node")
        if replica == len(self.engines):
            self.engines.append(self._make())
            self.had.append([])
        self.engines[replica] = self._make()
        self.hung.discard(replica)
        self.doomed.discard(replica)
        return None

    def _lost(self, replica: int) -> Lost | None:
        if replica in self.dead:
            return Lost("its process has died")
        return Lost("it is silent") if replica in self.hung else None


def asks(count: int) -> list[DecodeRequest]:
    prompt = np.asarray([5, 6, PROMPT_ENDS], np.int32)
    return [
        DecodeRequest(f"{i}/solver:0", prompt, 80, Sampling(stop_token_ids=(1,)), i, f"{i // 3}") for i in range(count)
    ]


def is_whole(result: DecodeResult) -> bool:
    return result.finish is Finish.STOP and result.token_ids.tolist() == completion(result.uid)
