"""All replicas of one policy behind the interface of one engine.

    pool = make_pool(...)                                  # build.py
    pool.submit(requests, version=3)
    results = pool.collect(timeout_s=0.2)
    pool.update_weights(WeightUpdate(path, 4)); pool.close()

Requests of one affinity (one prompt, one group) stay on one replica, where their prefix is computed once; the costliest
affinities are dealt out first, each to the replica with the least work.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from marsrl.rollout.engines.protocol import (
    AdapterUpdate,
    DecodeRequest,
    DecodeResult,
    EngineInfo,
    MemoryPart,
    WeightReceipt,
    WeightUpdate,
)
from marsrl.rollout.pool.collect_spans import CollectSpans
from marsrl.rollout.pool.dispatch import Dispatcher
from marsrl.rollout.pool.recovery import SETTLE_S, Faults, Recovery
from marsrl.rollout.pool.replicas import Lost, OnLost, Replicas, Timed, call_one, ignore_loss
from marsrl.rollout.types import Finish, FloatArray, IntArray

_log = logging.getLogger(__name__)

_DRAIN_S = 0.2  # for which a look at what has ended waits while draining
_LOOK_S = 5.0  # between two looks for a place

OnCall = Callable[[int, str, float, float], None]
"""Told (replica, method, start, end) of every call that an engine served; times as in replicas.Timed."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that a replica has. since: by the pool's clock."""

    request: DecodeRequest
    replica: int
    since: float


class EnginePool(AbstractContextManager["EnginePool"]):
    """n replicas of one policy, which may serve adapters of it too. Every method is called by one thread at a time; close() may
    be called twice.

        pool.submit(requests, version=3)          # at any time; dispatch.py says which replica gets what, and when
        results = pool.collect(timeout_s=0.2)     # what has ended meanwhile
        results = pool.drain()                    # all the rest, as far as it got; the replicas are idle then

    A replica that is lost is restarted where that is possible (recovery.py), and its requests are decoded again from where
    each began: callers notice nothing but the time. A request that was on `attempts` lost replicas is retried alone, once
    nothing else is under way, and is an ERROR where it was alone on the last of them. Where no host has a place for a lost
    replica, the others go on without it, and it is back once one has.

    slots: requests that a replica gets at a time; None: all of them.
    deadline_s: a replica that has a request for longer, by `clock` (seconds), is lost.
    attempts, most_restarts: see rollout.max_request_attempts and rollout.max_engine_restarts.
    sleeps: the trainer's GPUs are the replicas' (rollout.placement=colocated): `sleep` gives their memory back, and the
        next call of anything else wakes them.
    host: the address of this process as the replicas reach it.
    on_call: may be set; told of every call that a replica has served (for trace.json).
    engines: numbers of the replicas that serve. generation: another one where other processes than before serve.
    busy_s: seconds that the replicas have worked on requests that came back, added up.
    """

    def __init__(
        self,
        replicas: Replicas,
        name: str = "main",
        *,
        slots: int | None = None,
        deadline_s: float | None = None,
        attempts: int = 3,
        most_restarts: int = 16,
        sleeps: bool = False,
        host: str = "127.0.0.1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.host = name, host
        self.on_call: OnCall | None = None
        self._replicas = replicas
        self._slots = slots
        self.engines = list(range(len(replicas)))
        self.generation = 0
        self._absent: list[int] = []  # lost, and without a place
        self._look_at = 0.0  # for places for them
        self.busy_s = 0.0
        self._dispatch = Dispatcher(len(replicas), slots)
        self._recovery = Recovery(replicas, name, most_restarts, self._tell)
        self._attempts = attempts
        self._losses: Counter[str] = Counter()  # lost replicas that had a request, by its uid
        self._retry_alone: deque[DecodeRequest] = deque()
        self._faults = Faults()
        self._is_draining = False
        self._sleeps = sleeps
        self._asleep: tuple[MemoryPart, ...] = ()  # what of the replicas' memory is the trainer's
        self._deadline_s, self._clock = deadline_s, clock
        self._sent: dict[str, _Sent] = {}  # by uid, oldest first
        self._version = 0  # of the requests that wait
        self._spans = CollectSpans(lambda replica, *span: self._tell(replica, "collect", *span))
        self._is_closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_engines(self) -> int:
        """Replicas that serve."""
        return len(self.engines)

    @property
    def num_slots(self) -> int | None:
        """Requests that all replicas have at a time; None: any number."""
        return None if self._slots is None else self._slots * self.num_engines

    @property
    def has_room(self) -> bool:
        """True if a request more would be sent at once; False where nobody knows, without slots."""
        return self._slots is not None and self.num_under_way < self._slots * self.num_engines

    @property
    def is_whole(self) -> bool:
        """No replica waits for a place."""
        return not self._absent

    @property
    def takes(self) -> Mapping[str, float] | None:
        """Resources of one host that each replica takes, by Ray's names; None where replicas cannot be stopped or made."""
        return self._replicas.takes if self._replicas.can_restart else None

    def give_engine(self) -> None:
        """One replica ends, and its place is free. Nothing is under way, and another one serves."""
        assert self.num_under_way == 0 and self.num_engines > 1, (self.num_under_way, self.num_engines)
        replica = self.engines[-1]
        self._replicas.stop(replica)
        self._leave(replica)

    def take_engine(self) -> bool:
        """One replica more, with the weights of now; False where there is no place, or it does not survive its start."""
        replica = self._free_number()
        if not self._replicas.has_place(SETTLE_S):
            return False
        if (lost := self._recovery.make(replica)) is not None:
            _log.warning("policy %s: engine %d, which is new, is lost: %s", self.name, replica, lost.reason)
            self._replicas.stop(replica)
            self._recovery.needs_weights.discard(replica)
            return False
        self._join(replica)
        return True

    def expect_engine(self) -> None:
        """One replica more, as soon as there is a place for it."""
        self._absent.append(self._free_number())

    def _free_number(self) -> int:
        return next(n for n in range(len(self._replicas) + 1) if n not in self.engines and n not in self._absent)

    def set_feed(self, feed: Callable[[int], Timed | Lost | None]) -> None:
        """feed(replica): have the trainer's ranks send a replica the weights of now (`hand`); None: they cannot at the moment.

        Called for a replica that was replaced, where no file has the weights: by whoever calls the pool, or `give_weights`.
        """
        self._recovery.feed = feed

    def give_weights(self) -> None:
        """Give the weights of now to replicas that were replaced while nobody could send them. Beside `collect`, too."""
        for replica in sorted(self._recovery.needs_weights):
            if (lost := self._recovery.load(replica)) is not None:
                self._restart(replica, lost.reason)

    def receive_weights(
        self, updates: Mapping[int, WeightUpdate], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        """Have replicas take the weights that the trainer's ranks send them while this waits: what each answers.

        on_lost: is told at once of one that is lost, for which nobody else's weights may wait. It is not replaced here.
        """
        answers = self._replicas.call(
            "update_weights", {replica: (update,) for replica, update in updates.items()}, on_lost
        )
        for replica, answer in sorted(answers.items()):
            if isinstance(answer, Timed):
                self._tell(replica, "update_weights", answer.start, answer.end)
        return answers

    def note_weights(self, version: int, checksums: Sequence[Mapping[str, int]]) -> None:
        """Note what the trainer's ranks sent to all: a new replica gets the same. checksums: of each shard of an engine."""
        self._dispatch.forget_homes()  # engines have dropped their prefix caches
        self._recovery.note_weights(WeightUpdate("", version), checksums)

    def replace(self, lost: Mapping[int, str]) -> None:
        """Make others of the replicas that were lost while weights came to all; they are sent to all again. lost: reasons."""
        for replica, reason in lost.items():
            self._restart(replica, reason)

    def stand_by(self) -> None:
        """Every replica is there and takes weights next; one that was lost is replaced."""
        self._wake("weights")
        self._look_for_places()
        self._call("info")

    def start(self) -> None:
        """Have replicas that are processes of their own make their engines; one that dies or is silent is restarted.

        Raises:
            Exception: what an engine raised that could not be made.
        """
        self._call("start")

    def infos(self) -> list[EngineInfo]:
        return self._call("info")

    def num_decoded(self) -> list[int]:
        """Tokens decoded since the start, by replica, whether it serves or not."""
        return self._replicas.num_decoded()

    @property
    def num_under_way(self) -> int:
        """Requests submitted and not back yet."""
        return len(self._sent) + self._dispatch.num_waiting + len(self._retry_alone)

    def submit(self, requests: Sequence[DecodeRequest], *, version: int, at_once: bool = False) -> None:
        """Queue requests and send those that a replica has room for.

        at_once: every replica gets its share at once, whatever its slots: which requests meet in an engine's batch does not
        depend on time, so that the same calls give the same bits.
        """
        self._wake()
        self._look_for_places()
        self._version = version
        self._dispatch.add(requests)
        self._send(at_once=at_once)

    def collect(self, timeout_s: float, *, is_urgent: bool = True) -> list[DecodeResult]:
        """Results that have come, waiting timeout_s at most for the first; freed slots are filled before it returns.

        is_urgent: something may follow from a result before all are back.

        Raises:
            TimeoutError: a replica that cannot be restarted has had a request for longer than deadline_s.
        """
        self._look_for_places()
        busy = self._dispatch.busy
        if not busy:
            if self.num_under_way:  # for replicas that have no weights yet
                time.sleep(min(timeout_s, _DRAIN_S))
                self._send()
            return []
        results: list[DecodeResult] = []
        lost: list[tuple[int, str]] = []
        for replica, answer in self._replicas.collect(busy, timeout_s, is_urgent=is_urgent):
            if isinstance(answer, Lost):
                lost.append((replica, answer.reason))
            else:
                self._spans.note(replica, answer.start, answer.end)
                results += answer.value
        for result in results:
            self.busy_s += result.seconds
            del self._sent[result.uid]
            self._dispatch.end(result.uid)
            if result.finish is not Finish.UNFINISHED:
                del self._losses[result.uid]
        for replica, reason in lost or self._overdue():
            results += self._requeued(replica, reason)
        self._send()
        if not self.num_under_way:
            self._spans.end()
        return results

    def drain(self) -> list[DecodeResult]:
        """End everything: results of all requests under way, UNFINISHED with the tokens there are."""
        waiting = [*self._dispatch.drop_waiting(), *self._retry_alone]
        self._retry_alone.clear()
        results = [self._untouched(request) for request in waiting]
        self._is_draining = True
        try:
            self._replicas.abort(self._dispatch.busy)
            while self._sent:
                results += self.collect(_DRAIN_S)
        finally:
            self._is_draining = False
        return results

    def take_faults(self) -> Faults:
        """Faults that were mended since the last call."""
        faults, self._faults = self._faults, Faults()
        return faults

    def score(self, sequences: Sequence[IntArray], adapter: str = "") -> list[list[FloatArray]]:
        """Log-probs of the same sequences from each replica: scores[i][sequence] of the i-th of engines, [N-1], nats."""
        self._wake()
        self.give_weights()
        return self._call("score", (list(sequences), adapter))

    def score_shared(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Log-probs [N-1] of each sequence, nats, which the replicas share out. Nothing decodes meanwhile."""
        self._wake()
        self.give_weights()
        scores: dict[int, FloatArray] = {}
        while left := [i for i in range(len(sequences)) if i not in scores]:
            shares = self._shares([len(sequences[i]) for i in left])
            asked = {replica: [left[place] for place in places] for replica, places in shares.items()}
            arguments = {replica: ([sequences[i] for i in own], "", False) for replica, own in asked.items()}
            for replica, answer in self._replicas.call("score", arguments).items():
                if isinstance(answer, Lost):
                    self._restart(replica, answer.reason)  # and what it had is shared out again
                    continue
                self._tell(replica, "score_shared", answer.start, answer.end)
                scores |= zip(asked[replica], answer.value, strict=True)
        return [scores[i] for i in range(len(sequences))]

    def _shares(self, lengths: Sequence[int]) -> dict[int, list[int]]:
        """{replica: its sequences}: the longest first, each to the replica with the fewest tokens."""
        shares: dict[int, list[int]] = {}
        tokens = dict.fromkeys(self.engines, 0)
        for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
            replica = min(tokens, key=lambda replica: tokens[replica])
            tokens[replica] += lengths[place]
            shares.setdefault(replica, []).append(place)
        return shares

    def update_weights(self, update: WeightUpdate) -> list[WeightReceipt]:
        """Have every replica read the new weights; returns when all of them hold them.

        What those that serve then report, in their order.
        """
        self._dispatch.forget_homes()  # engines drop their prefix caches
        self._wake("weights")
        receipts = self._call("update_weights", (update,))
        self._recovery.note_weights(update, receipts[0].checksums)
        self._wake("kv_cache")  # the probe needs it
        return receipts

    def update_adapter(self, update: AdapterUpdate) -> list[WeightReceipt]:
        """Have every replica read new numbers of an adapter; what those that serve then report, in their order.

        Prefixes that were cached with other adapters, or with none, stay.
        """
        self._wake("weights")
        receipts = self._call("update_adapter", (update,))
        self._recovery.note_adapter(update, receipts[0].checksums)
        self._wake("kv_cache")
        return receipts

    def forget_prefixes(self) -> None:
        """Have the replicas drop what they cached, as after new weights. Nothing decodes meanwhile."""
        self._dispatch.forget_homes()
        self._wake()
        self._call("forget_prefixes")

    def sleep(self, *, keeps_weights: bool) -> None:
        """Have the replicas give their memory to the trainer, where they share its GPUs; else nothing happens.

        keeps_weights: False where update_weights is the next that is asked of them. Those that sleep already go on as they do.
        """
        if not self._sleeps or self._asleep:
            return
        if self.num_under_way:
            raise RuntimeError(
                f"engines of policy {self.name} cannot sleep with {self.num_under_way} requests under way"
            )
        self._dispatch.forget_homes()
        self._call("sleep", (keeps_weights,))
        self._asleep = ("weights", "kv_cache")

    def _wake(self, *parts: MemoryPart) -> None:
        """Wake those of these parts that sleep; without arguments all that do."""
        for part in [part for part in self._asleep if part in parts or not parts]:
            self._call("wake", (part,))
            self._asleep = self._asleep[1:]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._replicas.close()

    def _call(self, method: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        """Answers of the replicas that serve; a lost one is replaced, and asked again."""
        engines, values = self.engines, []
        answers = self._replicas.call(method, dict.fromkeys(engines, arguments))
        for replica in engines:
            answer = answers[replica]
            while isinstance(answer, Lost) and self._restart(replica, answer.reason):
                answer = call_one(self._replicas, replica, method, arguments)
            if isinstance(answer, Timed):
                self._tell(replica, method, answer.start, answer.end)
                values.append(answer.value)
        return values

    def _restart(self, replica: int, reason: str) -> bool:
        """Replace a lost replica; False where it has no place, and the others go on without it."""
        self._dispatch.forget_homes(replica)
        before, others = self._recovery.num_restarts, set(self.engines) - {replica}
        is_back = self._recovery.restart(replica, reason, has_others=bool(others))
        num_restarts = self._faults.engine_restarts + self._recovery.num_restarts - before
        self._faults = replace(self._faults, engine_restarts=num_restarts)
        if is_back:
            self._join(replica)
        else:
            self._absent.append(replica)
            self._look_at = self._clock() + _LOOK_S
            self._leave(replica)
        return is_back

    def _join(self, replica: int) -> None:
        """A replica serves, which may have done so before."""
        self.generation += 1
        self.engines = sorted({*self.engines, replica})
        self._dispatch.open(replica)

    def _leave(self, replica: int) -> None:
        """A replica serves no more; what waits for it waits for others."""
        self.generation += 1
        self.engines = [each for each in self.engines if each != replica]
        self._recovery.needs_weights.discard(replica)
        self._dispatch.close(replica)

    def _look_for_places(self) -> None:
        """Replicas that were lost with their hosts are back where a host has a place again."""
        if not self._absent or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + _LOOK_S
        while self._absent and self._replicas.has_place(0.0):
            if not self._restart(self._absent.pop(0), "no host had a place for it until now"):
                return

    def _requeued(self, replica: int, reason: str) -> list[DecodeResult]:
        """Restart a lost replica and queue what it had; the results of those that are not queued."""
        requests = [sent.request for sent in self._sent.values() if sent.replica == replica]
        for request in requests:
            del self._sent[request.uid]
            self._dispatch.end(request.uid)
        self._restart(replica, reason)
        self._losses.update(request.uid for request in requests)
        suspects = [request for request in requests if self._losses[request.uid] >= self._attempts]
        given_up = suspects if len(requests) == 1 else []
        self._faults = replace(
            self._faults,
            resubmitted=self._faults.resubmitted + len(requests) - len(given_up),
            failed=self._faults.failed + len(given_up),
        )
        if given_up:
            del self._losses[given_up[0].uid]
            return [self._given_up(given_up[0], reason)]
        if self._is_draining:
            return [self._untouched(request) for request in requests]
        self._dispatch.add([request for request in requests if self._losses[request.uid] < self._attempts])
        self._retry_alone += suspects
        return []

    def _untouched(self, request: DecodeRequest) -> DecodeResult:
        return DecodeResult.without_tokens(request.uid, Finish.UNFINISHED, self._version)

    def _given_up(self, request: DecodeRequest, reason: str) -> DecodeResult:
        _log.warning("policy %s: request %s is given up, its sample has no reward: %s", self.name, request.uid, reason)
        why = f"given up: engines were lost with it (rollout.max_request_attempts), the last one alone: {reason}"
        return DecodeResult.without_tokens(request.uid, Finish.ERROR, self._version, why)

    def _tell(self, replica: int, method: str, start: float, end: float) -> None:
        if self.on_call is not None:
            self.on_call(replica, method, start, end)

    def _send(self, *, at_once: bool = False) -> None:
        """at_once: whatever slots there are."""
        if self._losses[next(iter(self._sent), "")] >= self._attempts:
            return  # it is retried alone
        now = self._clock()
        if self._retry_alone and not self._sent and not self._dispatch.num_waiting:
            self._dispatch.add([self._retry_alone.popleft()])
        for replica, requests in self._dispatch.take(self._recovery.needs_weights, at_once=at_once).items():
            self._sent.update((request.uid, _Sent(request, replica, now)) for request in requests)
            self._replicas.submit(replica, requests, self._version)

    def _overdue(self) -> list[tuple[int, str]]:
        """The replica that has had a request for longer than the deadline, and that in words."""
        oldest = next(iter(self._sent.values()), None)
        if oldest is None or self._deadline_s is None or self._clock() - oldest.since <= self._deadline_s:
            return []
        reason = (
            f"request {oldest.request.uid} has not come back after rollout.deadline_s = {self._deadline_s:g} s; raise it, "
            "or lower rollout.segment_length, if engines are just slow"
        )
        if not self._replicas.can_restart:
            raise TimeoutError(f"engines of policy {self.name}: {reason}")
        return [(oldest.replica, reason)]
