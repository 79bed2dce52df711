"""Pool of engine replicas for one policy, with the interface of one engine.

Requests of one affinity (one prompt, one group) stay on one replica, which computes their prefix once. The costliest
affinities are assigned first, each to the replica with the least work.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from marsrl.rollout.engines.protocol import (
    AdapterUpdate,
    DecodeRequest,
    DecodeResult,
    EngineInfo,
    MemoryPart,
    WeightReceipt,
    WeightUpdate,
    taken_from,
)
from marsrl.rollout.pool.dispatch import Dispatcher
from marsrl.rollout.pool.recovery import SETTLE_S, Faults, Recovery
from marsrl.rollout.pool.replicas import Lost, OnLost, Replicas, Timed, ignore_loss
from marsrl.rollout.types import Finish, FloatArray, IntArray

_log = logging.getLogger(__name__)

_DRAIN_S = 0.2  # timeout of one collect while draining
_LOOK_S = 5.0  # interval between attempts to place a lost replica
_SPAN_S, _PAUSE_S = 1.0, 0.05  # longest span of decoding that on_call receives, and longest gap within one

OnCall = Callable[[int, str, float, float], None]
"""Called with (replica, method, start, end) after every call that an engine served; times as in replicas.Timed."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request at a replica. since: time of its submission, by the pool's clock."""

    request: DecodeRequest
    replica: int
    since: float


class EnginePool(AbstractContextManager["EnginePool"]):
    """Pool of engine replicas for one policy and adapters of it.

    One thread at a time may call it; close() may be called twice.

        pool = make_pool(...)                     # build.py
        pool.submit(requests, version=3)          # at any time; dispatch.py chooses the replica and the moment
        results = pool.collect(timeout_s=0.2)     # finished requests
        results = pool.drain()                    # all others, with their tokens so far; the replicas are idle afterwards
        results = pool.drain("verifier")          # one adapter's; the others continue

    A lost replica is restarted if possible (recovery.py), and its requests are decoded again from the start of their
    segment: callers notice only the delay. A request that was on `attempts` lost replicas is retried alone, once nothing
    else is under way, and becomes an ERROR if that replica is lost too. If no host has room for a lost replica, the others
    continue until one has.

    slots: maximum number of requests that a replica holds at a time; None: no limit.
    deadline_s: time limit of a request, by `clock` (seconds); a replica that holds one for longer counts as lost.
    attempts, most_restarts: rollout.max_request_attempts and rollout.max_engine_restarts.
    sleeps: True if replicas share the trainer's GPUs (rollout.placement=colocated). `sleep` then frees their memory, and the
        next call of any other method wakes them.
    host: address at which replicas reach this process.
    on_call: optional callback for every call that a replica has served (for trace.json).
    engines: numbers of the serving replicas. generation: counter that grows whenever the serving processes change.
    busy_s: total seconds that replicas worked on finished requests.
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
        self._absent: list[int] = []  # lost replicas for which no host has room
        self._look_at = 0.0  # time of the next attempt to place absent replicas
        self.busy_s = 0.0
        self._dispatch = Dispatcher(len(replicas), slots)
        self._recovery = Recovery(replicas, name, most_restarts, self._tell)
        self._attempts = attempts
        self._losses: Counter[str] = Counter()  # lost replicas that held a request, by uid
        self._retry_alone: deque[DecodeRequest] = deque()
        self._faults = Faults()
        self._over: list[DecodeResult] = []  # results of abandoned requests, for the next `collect`
        self._is_draining = False
        self._sleeps = sleeps
        self._asleep: tuple[MemoryPart, ...] = ()  # parts of the replicas' memory that the trainer uses
        self._deadline_s, self._clock = deadline_s, clock
        self._sent: dict[str, _Sent] = {}  # by uid, oldest first
        self._version = 0  # version of the waiting requests
        self._spans: dict[int, tuple[float, float]] = {}  # unreported spans of back-to-back `collect` calls, by replica

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def num_engines(self) -> int:
        """Number of serving replicas."""
        return len(self.engines)

    @property
    def num_slots(self) -> int | None:
        """Number of requests that all replicas hold at a time; None: no limit."""
        return None if self._slots is None else self._slots * self.num_engines

    @property
    def has_room(self) -> bool:
        """True if one more request would be sent at once. False if slots are unlimited, since room is then unknown."""
        return self.num_slots is not None and self.num_under_way < self.num_slots

    @property
    def is_whole(self) -> bool:
        """True if no replica waits for room."""
        return not self._absent

    @property
    def takes(self) -> Mapping[str, float] | None:
        """Resources of one host that each replica takes, by Ray's names; None if replicas cannot be stopped or added."""
        return self._replicas.takes if self._replicas.can_restart else None

    def give_engine(self) -> None:
        """Stop one replica and free its resources. Nothing may be under way, and another replica must remain."""
        assert self.num_under_way == 0 and self.num_engines > 1, (self.num_under_way, self.num_engines)
        replica = self.engines[-1]
        self._replicas.stop(replica)
        self._leave(replica)

    def take_engine(self) -> bool:
        """Add a replica with the current weights; False if no host has room or it fails to start."""
        replica = self._free_number()
        if not self._replicas.has_place(SETTLE_S):
            return False
        if (lost := self._recovery.make(replica)) is not None:
            _log.warning("policy %s: new engine %d is lost: %s", self.name, replica, lost.reason)
            self._replicas.stop(replica)
            self._recovery.needs_weights.discard(replica)
            return False
        self._join(replica)
        return True

    def expect_engine(self) -> None:
        """Add a replica as soon as a host has room."""
        self._absent.append(self._free_number())

    def _free_number(self) -> int:
        return next(n for n in itertools.count() if n not in self.engines and n not in self._absent)

    def set_feed(self, feed: Callable[[int], Timed | Lost | None]) -> None:
        """Set feed(replica), which sends a replica the current weights from the trainer's ranks, or returns None if it cannot.

        Pool methods that replace a lost replica call it if no file holds the weights; `give_weights` calls it for replicas that
        still lack them.
        """
        self._recovery.feed = feed

    def give_weights(self) -> None:
        """Send the current weights to replicas replaced while the feed could not send. May run concurrently with `collect`."""
        for replica in sorted(self._recovery.needs_weights):
            if (lost := self._recovery.load(replica)) is not None:
                self._restart(replica, lost.reason)

    def receive_weights(
        self, updates: Mapping[int, WeightUpdate], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        """Have replicas receive the weights that the trainer's ranks send meanwhile; return each replica's answer.

        on_lost: called at once with a lost replica, so that senders do not wait for it. The replica is not replaced here.
        """
        return self._ask("update_weights", {replica: (update,) for replica, update in updates.items()}, on_lost)

    def note_weights(self, version: int, checksums: Sequence[Mapping[str, int]]) -> None:
        """Record weights that the trainer's ranks have sent, for new replicas. checksums: {tensor: checksum} of each shard."""
        self._dispatch.forget_homes()  # engines have dropped their prefix caches
        self._recovery.note_weights(WeightUpdate("", version), checksums)

    def replace(self, lost: Mapping[int, str]) -> None:
        """Replace replicas lost during a broadcast of weights, which the caller then repeats to all. lost: reason by replica."""
        for replica, reason in lost.items():
            self._restart(replica, reason)

    def stand_by(self) -> None:
        """Replace lost replicas, so that every replica can receive weights."""
        self._wake("weights")
        self._look_for_places()
        self._call("info")

    def start(self) -> None:
        """Build the engines of replicas in other processes; restart those that die or fall silent.

        Raises Exception: an engine failed to build.
        """
        self._call("start")

    def infos(self) -> list[EngineInfo]:
        return self._call("info")

    def num_decoded(self, within_s: float = 1.0) -> list[int]:
        """Return the number of tokens decoded since the start, by replica; the last known number without a timely answer."""
        return self._replicas.num_decoded(within_s)

    @property
    def num_under_way(self) -> int:
        """Number of requests submitted and not yet returned."""
        return len(self._sent) + self._dispatch.num_waiting + len(self._retry_alone) + len(self._over)

    def submit(self, requests: Sequence[DecodeRequest], *, version: int, at_once: bool = False) -> None:
        """Queue requests, and send those for which a replica has a free slot.

        at_once: True to send every replica its whole share, ignoring slots. The composition of an engine's batches then does not
        depend on timing, so the same calls give the same bits.
        """
        self._wake()
        self._look_for_places()
        self._version = version
        self._dispatch.add(requests)
        self._send(at_once=at_once)

    def collect(self, timeout_s: float, *, is_urgent: bool = True) -> list[DecodeResult]:
        """Return finished results, waiting at most timeout_s for the first; refill freed slots before returning.

        is_urgent: True if a result may trigger further requests before all results are back.

        Raises TimeoutError: a replica that cannot be restarted has held a request for longer than deadline_s.
        """
        self._look_for_places()
        busy = self._dispatch.busy
        if not busy and not self._over:
            if self.num_under_way:  # requests wait for replicas that have no weights yet
                time.sleep(min(timeout_s, _DRAIN_S))
                self._send()
            return []
        results: list[DecodeResult] = []
        lost: list[tuple[int, str]] = []
        for replica, answer in self._replicas.collect(busy, timeout_s, is_urgent=is_urgent):
            if isinstance(answer, Lost):
                lost.append((replica, answer.reason))
            else:
                self._note_span(replica, answer.start, answer.end)
                results += answer.value
        for result in results:
            self.busy_s += result.seconds
            del self._sent[result.uid]
            self._dispatch.end(result.uid)
            if result.finish is not Finish.UNFINISHED:
                del self._losses[result.uid]
        for replica, reason in lost or self._overdue():
            self._replace(replica, reason)
        results += self._over
        self._over = []
        self._send()
        if not self.num_under_way:
            for replica in list(self._spans):
                self._tell(replica, "collect", *self._spans.pop(replica))
        return results

    def drain(self, adapter: str | None = None) -> list[DecodeResult]:
        """Stop requests that use the adapter (None: all) and return them as UNFINISHED, with their tokens so far.

        Also returns results that have finished meanwhile.
        """
        results: list[DecodeResult] = []
        self._is_draining = True  # nothing is sent, not even requests of a replica lost meanwhile
        try:
            # An engine without such requests would keep the abort pending, and apply it to later requests.
            holders = {sent.replica for sent in self._sent.values() if sent.request.uses(adapter)}
            self._replicas.abort(sorted(holders), adapter)
            while any(sent.request.uses(adapter) for sent in self._sent.values()):
                results += self.collect(_DRAIN_S)
        finally:
            self._is_draining = False
        waiting = [*self._dispatch.drop_waiting(adapter), *taken_from(self._retry_alone, adapter)]
        self._send()
        untouched = (DecodeResult.without_tokens(each.uid, Finish.UNFINISHED, self._version) for each in waiting)
        return [*results, *untouched]

    def take_faults(self) -> Faults:
        """Return the faults recovered since the last call."""
        faults, self._faults = self._faults, Faults()
        return faults

    def score(self, sequences: Sequence[IntArray], adapter: str | Sequence[str] = "") -> list[list[FloatArray]]:
        """Return scores[i][j]: log-probs [N-1], nats, of sequence j by replica engines[i].

        adapter: one adapter for all sequences, or a list with one for each.
        """
        self._wake()
        self.give_weights()
        return self._call("score", (list(sequences), adapter))

    def score_shared(self, sequences: Sequence[IntArray], temperature: float) -> list[FloatArray]:
        """Return log-probs [N-1] of each sequence at the temperature, nats. Nothing may be decoding.

        The replicas share the sequences.
        """
        self._wake()
        self.give_weights()
        scores: dict[int, FloatArray] = {}
        while left := [i for i in range(len(sequences)) if i not in scores]:
            left.sort(key=lambda i: -len(sequences[i]))
            shares = {replica: left[place :: len(self.engines)] for place, replica in enumerate(self.engines)}
            arguments = {
                replica: ([sequences[i] for i in share], "", temperature) for replica, share in shares.items() if share
            }
            for replica, answer in self._ask("score", arguments).items():
                if isinstance(answer, Lost):
                    self._restart(replica, answer.reason)  # the next round splits its share again
                else:
                    scores |= zip(shares[replica], answer.value, strict=True)
        return [scores[i] for i in range(len(sequences))]

    def update_weights(self, update: WeightUpdate) -> list[WeightReceipt]:
        """Have every replica load new weights; return the serving replicas' receipts, in order, once all hold them."""
        self._dispatch.forget_homes()  # engines drop their prefix caches
        self._wake("weights")
        receipts = self._call("update_weights", (update,))
        self._recovery.note_weights(update, receipts[0].checksums)
        self._wake("kv_cache")  # the probe that checks the new weights needs the cache
        return receipts

    def update_adapters(self, updates: Sequence[AdapterUpdate]) -> list[list[WeightReceipt]]:
        """Have every replica load new weights of adapters, in one call; return the serving replicas' receipts for each adapter.

        These adapters' requests must be drained; others continue, and their cached prefixes stay.
        """
        self._wake("weights")
        receipts = [list(of_adapter) for of_adapter in zip(*self._call("update_adapters", (updates,)), strict=True)]
        for update, of_adapter in zip(updates, receipts, strict=True):
            self._recovery.note_adapter(update, of_adapter[0].checksums)
        self._wake("kv_cache")
        return receipts

    def forget_prefixes(self) -> None:
        """Have replicas drop their prefix caches, as after new weights. Nothing may be decoding."""
        self._dispatch.forget_homes()
        self._wake()
        self._call("forget_prefixes")

    def sleep(self, *, keeps_weights: bool) -> None:
        """Have replicas free their memory for the trainer if they share its GPUs; else do nothing.

        keeps_weights: False if update_weights comes next. Replicas already asleep stay unchanged.
        """
        if not self._sleeps or self._asleep:
            return
        if self.num_under_way:
            raise RuntimeError(
                f"engines of policy {self.name} cannot sleep with {self.num_under_way} requests under way; drain them first"
            )
        self._dispatch.forget_homes()
        self._call("sleep", (keeps_weights,))
        self._asleep = ("weights", "kv_cache")

    def _wake(self, *parts: MemoryPart) -> None:
        """Wake the given parts that sleep; without arguments, all."""
        for part in [part for part in self._asleep if part in parts or not parts]:
            self._call("wake", (part,))
            self._asleep = self._asleep[1:]

    def close(self) -> None:
        self._replicas.close()

    def _call(self, method: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        """Call the serving replicas and return their answers; replace lost replicas, and repeat their call and requests."""
        engines, values = self.engines, []
        answers = self._ask(method, dict.fromkeys(engines, arguments))
        for replica in engines:
            answer = answers[replica]
            while isinstance(answer, Lost) and self._replace(replica, answer.reason):
                answer = self._ask(method, {replica: arguments})[replica]
            if isinstance(answer, Timed):
                values.append(answer.value)
        return values

    def _ask(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], on_lost: OnLost = ignore_loss
    ) -> Mapping[int, Timed | Lost]:
        """Call as Replicas.call does, and report answered calls to on_call."""
        answers = self._replicas.call(method, arguments, on_lost)
        for replica, answer in sorted(answers.items()):
            if isinstance(answer, Timed):
                self._tell(replica, method, answer.start, answer.end)
        return answers

    def _restart(self, replica: int, reason: str) -> bool:
        """Replace a lost replica; False if no host has room and the others continue without it."""
        self._dispatch.forget_homes(replica)
        before, others = self._recovery.num_restarts, set(self.engines) - {replica}
        is_back = self._recovery.restart(replica, reason, has_others=bool(others))
        self._faults.engine_restarts += self._recovery.num_restarts - before
        if is_back:
            self._join(replica)
        else:
            self._absent.append(replica)
            self._look_at = self._clock() + _LOOK_S
            self._leave(replica)
        return is_back

    def _join(self, replica: int) -> None:
        """Mark a replica as serving, for the first time or again."""
        self.generation += 1
        self.engines = sorted({*self.engines, replica})
        self._dispatch.open(replica)

    def _leave(self, replica: int) -> None:
        """Mark a replica as gone, and move its queue to others."""
        self.generation += 1
        self.engines = [each for each in self.engines if each != replica]
        self._recovery.needs_weights.discard(replica)
        self._dispatch.close(replica)

    def _look_for_places(self) -> None:
        """Restore replicas that were lost with their hosts once a host has room."""
        if not self._absent or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + _LOOK_S
        while self._absent and self._replicas.has_place(0.0):
            if not self._restart(self._absent.pop(0), "no host had room for it until now"):
                return

    def _replace(self, replica: int, reason: str) -> bool:
        """Restart a lost replica as `_restart` does, and requeue its requests; end those over their limit of attempts."""
        requests = [sent.request for sent in self._sent.values() if sent.replica == replica]
        for request in requests:
            del self._sent[request.uid]
            self._dispatch.end(request.uid)
        is_back = self._restart(replica, reason)
        self._losses.update(request.uid for request in requests)
        if len(requests) == 1 and self._is_suspect(uid := requests[0].uid):
            self._faults.failed += 1
            del self._losses[uid]
            _log.warning("policy %s: request %s is abandoned and its sample has no reward: %s", self.name, uid, reason)
            why = f"abandoned: it lost rollout.max_request_attempts engines or more, the last one while it ran alone: {reason}"
            self._over.append(DecodeResult.without_tokens(uid, Finish.ERROR, self._version, why))
            return is_back
        self._faults.resubmitted += len(requests)
        self._dispatch.add([request for request in requests if not self._is_suspect(request.uid)])
        self._retry_alone += [request for request in requests if self._is_suspect(request.uid)]
        return is_back

    def _is_suspect(self, uid: str) -> bool:
        """Return True if this request must be retried alone, since it may crash engines."""
        return self._losses[uid] >= self._attempts

    def _note_span(self, replica: int, start: float, end: float) -> None:
        first, last = self._spans.get(replica, (start, start))
        if replica in self._spans and (start - last > _PAUSE_S or end - first > _SPAN_S):
            self._tell(replica, "collect", first, last)
            first = start
        self._spans[replica] = (first, end)

    def _tell(self, replica: int, method: str, start: float, end: float) -> None:
        if self.on_call is not None:
            self.on_call(replica, method, start, end)

    def _send(self, *, at_once: bool = False) -> None:
        """Send queued requests to replicas with free slots. at_once: ignore slots."""
        if self._is_draining or self._is_suspect(next(iter(self._sent), "")):
            return
        now = self._clock()
        if self._retry_alone and not self._sent and not self._dispatch.num_waiting:
            self._dispatch.add([self._retry_alone.popleft()])
        for replica, requests in self._dispatch.take(self._recovery.needs_weights, at_once=at_once).items():
            self._sent.update((request.uid, _Sent(request, replica, now)) for request in requests)
            self._replicas.submit(replica, requests, self._version)

    def _overdue(self) -> list[tuple[int, str]]:
        """Return the replica that has held a request past the deadline, and a message."""
        oldest = next(iter(self._sent.values()), None)
        if oldest is None or self._deadline_s is None or self._clock() - oldest.since <= self._deadline_s:
            return []
        reason = (
            f"request {oldest.request.uid} has not returned within rollout.deadline_s = {self._deadline_s:g} s; if engines are "
            "just slow, raise it or lower rollout.segment_length"
        )
        if not self._replicas.can_restart:
            raise TimeoutError(f"engines of policy {self.name}: {reason}")
        return [(oldest.replica, reason)]
