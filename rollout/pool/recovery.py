"""A lost engine is replaced by a new one that holds the weights of now, proven by their checksums.

An engine is lost when its process has died, when it has not answered within rollout.deadline_s, or when its decoding
raised something that is no refusal. What becomes of its requests is decided in retries.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from marsrl.rollout.engines.protocol import WeightReceipt, WeightUpdate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """In place of an engine's answer: it will not give any. reason: for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Faults:
    """What went wrong and was mended. resubmitted: requests decoded again; failed: given up (see retries.py)."""

    engine_restarts: int = 0
    resubmitted: int = 0
    failed: int = 0


class Replaceable(Protocol):
    """The part of replicas.Replicas that a recovery needs."""

    @property
    def can_restart(self) -> bool:
        """False where engines live in this process: what ails them ails it too."""

    def restart(self, replica: int) -> Lost | None:
        """End what is left of an engine and make a new one, with the weights of its start. Lost: that failed too."""

    def call_one(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Any:
        """A Timed or Lost: method(*arguments) on one replica."""


class Recovery:
    """Restarts engines, and counts.

    name: of the policy. most: restarts in a run; one more ends it.
    on_restart: told (replica, start, end), time.time(), of each.
    """

    def __init__(self, replicas: Replaceable, name: str, most: int, on_restart: Callable[[int, float, float], None]):
        self._replicas, self._name, self._most, self._on_restart = replicas, name, most, on_restart
        self._updates: Sequence[WeightUpdate] = ()  # of now, by replica; () before the first
        self._checksums: Sequence[Mapping[str, int]] = ()  # of each shard of an engine; all engines hold the same
        self._num_restarts = 0

    def note_weights(self, updates: Sequence[WeightUpdate], receipts: Sequence[WeightReceipt]) -> None:
        """From now on a restarted engine gets these weights; whoever sent them compares the receipts with what it sent."""
        self._updates, self._checksums = updates, receipts[0].checksums

    def restart(self, replica: int, reason: str, next_update: WeightUpdate | None = None) -> None:
        """Replace a lost engine.

        Args:
            next_update: the weights that the caller sends it next; those of now are left out then.

        Raises:
            RuntimeError: too many restarts in this run; no file has the weights; or the new engine holds other numbers
                than the others.
        """
        start = time.time()
        update = next_update or (self._updates[replica] if self._updates else None)
        if update is not None and not update.path:
            raise RuntimeError(
                f"engines of policy {self._name}: engine {replica} is lost ({reason}), and this sync.backend leaves no file "
                f"of the weights of version {update.version} that a new one could load; go on from the last checkpoint "
                "with run.resume=auto (sync.backend=shm keeps such files)"
            )
        lost: Lost | None = Lost(reason)
        while lost is not None:
            self._num_restarts += 1
            if self._num_restarts > self._most:
                raise RuntimeError(
                    f"engines of policy {self._name}: engine {replica} is lost ({lost.reason}), and they have been "
                    f"restarted {self._most} times in this run (rollout.max_engine_restarts); what an engine said last "
                    "is in Ray's logs (/tmp/ray/session_latest/logs); go on from the last checkpoint with run.resume=auto"
                )
            _log.warning("policy %s: engine %d is lost: %s; it is restarted", self._name, replica, lost.reason)
            lost = self._replicas.restart(replica)
            if lost is None and next_update is None and update is not None:
                lost = self._load(replica, update)
        end = max(start, time.time())  # the wall clock may be set back
        self._on_restart(replica, start, end)
        held = "those of its start" if update is None or next_update is not None else f"version {update.version}"
        _log.warning("policy %s: engine %d is back after %.1f s, weights: %s", self._name, replica, end - start, held)

    @property
    def num_restarts(self) -> int:
        """In this run so far."""
        return self._num_restarts

    def _load(self, replica: int, update: WeightUpdate) -> Lost | None:
        """The weights of now into a new engine; Lost where it does not survive that."""
        answer = self._replicas.call_one(replica, "update_weights", (update,))
        if isinstance(answer, Lost):
            return answer
        shards = list(zip(self._checksums, answer.value.checksums, strict=True))
        wrong = [name for right, held in shards for name in {**right, **held} if held.get(name) != right.get(name)]
        if wrong or answer.value.version != update.version:
            raise RuntimeError(
                f"engines of policy {self._name}: engine {replica} was restarted with the weights of version "
                f"{update.version}, reports version {answer.value.version} and does not hold what the others hold: "
                f"{len(wrong)} of {sum(map(len, self._checksums))} tensors differ, first {', '.join(wrong[:3])}"
            )
        return None
