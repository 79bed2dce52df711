"""Replacement of a lost engine by a new one that holds the current weights, verified by checksums.

If the lost engine's host is gone and no other host has room, the policy's other engines continue without it until a host has room
(pool.py). A policy without another engine waits up to rollout.join_s for room.

The weights come from the file of the last update or, with sync.backend=nccl or ipc, from the trainer's ranks (`feed`). If the
ranks are in the middle of a step, the new engine gets no requests until they can send. Adapters are loaded from their files,
after the weights.

An engine is lost when its process dies, does not answer within rollout.deadline_s, raises an error while decoding (other than
a rejected call), or does not receive all weights from the trainer's ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from marsrl.rollout.engines.protocol import AdapterUpdate, WeightReceipt, WeightUpdate
from marsrl.rollout.pool.replicas import Lost, Replicas, Timed, call_one

_log = logging.getLogger(__name__)

SETTLE_S = 10.0  # time until every part of Ray counts resources that an actor has freed or a node has added


@dataclass(slots=True)
class Faults:
    """Counts of recovered faults. resubmitted: requests decoded again. failed: requests given up."""

    engine_restarts: int = 0
    resubmitted: int = 0
    failed: int = 0


class Recovery:
    """Restarter of lost engines, with a limit on restarts.

    name: name of the policy. most: number of restarts allowed in a run; the next lost engine ends the run.
    tell: called with (replica, "restart", start, end) after each restart; the last two are times by time.time().
    """

    def __init__(self, replicas: Replicas, name: str, most: int, tell: Callable[[int, str, float, float], None]):
        self._replicas, self._name, self._most, self._tell = replicas, name, most, tell
        self._update: WeightUpdate | None = None  # current weights; None before the first update
        self._checksums: Sequence[Mapping[str, int]] = ()  # checksums of each shard, equal for all engines
        # {adapter: (current weights, checksums of each shard)}
        self._adapters: dict[str, tuple[AdapterUpdate, Sequence[Mapping[str, int]]]] = {}
        self.num_restarts = 0
        self.feed: Callable[[int], Timed | Lost | None] | None = None
        self.needs_weights = set[int]()  # replicas that still have initial weights

    def note_weights(self, update: WeightUpdate, checksums: Sequence[Mapping[str, int]]) -> None:
        """Load these weights into new engines from now on; each shard must report these checksums."""
        self._update, self._checksums = update, checksums
        self.needs_weights.clear()

    def note_adapter(self, update: AdapterUpdate, checksums: Sequence[Mapping[str, int]]) -> None:
        """Also load this adapter into new engines from now on."""
        self._adapters[update.name] = update, checksums

    def restart(self, replica: int, reason: str, *, has_others: bool) -> bool:
        """Replace a lost engine, with the current weights; False if no host has room and others serve (has_others).

        Raises RuntimeError: too many restarts in this run, no room for the only engine, or the new engine's weights differ from
        the others'.
        """
        start = time.time()
        lost: Lost | None = Lost(reason)
        while lost is not None:
            self._replicas.stop(replica)
            if has_others and not self._replicas.has_place(SETTLE_S):
                _log.warning(
                    "policy %s: engine %d is lost: %s; no host has room for it; the run continues without it until one has",
                    self._name, replica, lost.reason,
                )  # fmt: skip
                self.needs_weights.discard(replica)
                return False
            self.num_restarts += 1
            if self.num_restarts > self._most:
                raise RuntimeError(
                    f"engines of policy {self._name}: engine {replica} is lost ({lost.reason}) after {self._most} restarts in "
                    "this run (rollout.max_engine_restarts); see its last output in Ray's logs "
                    "(/tmp/ray/session_latest/logs), and resume from the last checkpoint with run.resume=auto"
                )
            _log.warning("policy %s: engine %d is lost: %s; restarting it", self._name, replica, lost.reason)
            lost = self.make(replica)
        end = time.time()
        self._tell(replica, "restart", start, end)
        _log.warning("policy %s: engine %d is restored after %.1f s", self._name, replica, end - start)
        return True

    def make(self, replica: int) -> Lost | None:
        """Start a new engine with this replica number and the current weights; Lost if the engine dies meanwhile."""
        lost = self._replicas.restart(replica)
        if lost is None and (self._update is not None or self._adapters):
            self.needs_weights.add(replica)
            lost = self.load(replica)
        return lost

    def load(self, replica: int) -> Lost | None:
        """Load the current weights and adapters into a new engine, unless the trainer's ranks cannot send them now.

        Returns Lost if the engine dies meanwhile.
        """
        if (update := self._update) is not None:
            answer: Timed | Lost | None
            if update.path:
                answer = call_one(self._replicas, replica, "update_weights", (update,))
            elif self.feed is None:
                raise RuntimeError(
                    f"engines of policy {self._name}: engine {replica} is lost, and the weights of version "
                    f"{update.version} are not in a file, and no trainer can send them; resume the run, or start again"
                )
            elif (answer := self.feed(replica)) is None:
                return None
            if isinstance(answer, Lost):
                return answer
            self._check(replica, answer.value, "weights", update.version, self._checksums)
        for name, (adapter, checksums) in self._adapters.items():
            answer = call_one(self._replicas, replica, "update_adapter", (adapter,))
            if isinstance(answer, Lost):
                return answer
            self._check(replica, answer.value, f"adapter {name}", adapter.version, checksums)
        self.needs_weights.discard(replica)
        return None

    def _check(
        self, replica: int, receipt: WeightReceipt, kind: str, version: int, checksums: Sequence[Mapping[str, int]]
    ) -> None:
        shards = list(zip(checksums, receipt.checksums, strict=True))
        wrong = [
            name for right, loaded in shards for name in {**right, **loaded} if loaded.get(name) != right.get(name)
        ]
        if wrong or receipt.version != version:
            raise RuntimeError(
                f"engines of policy {self._name}: engine {replica} was restarted with the {kind} of version {version}, but "
                f"reports version {receipt.version} and other weights than the rest: {len(wrong)} of "
                f"{sum(map(len, checksums))} tensors differ, first {', '.join(wrong[:3])}"
            )
