"""Assignment of requests to replicas: prefer the replica with the cached prefix, send long requests first, keep replicas busy.

    dispatch.add(requests)          queues each request at one replica:
                                        a returning sample: at its last replica, unless another has less work, prefill included
                                        all requests of a new affinity: at the replica with the least work
    dispatch.take() -> shares       every replica with free slots takes the longest requests of its own queue; if
                                    that is empty, the longest of the fullest other queue
    dispatch.end(uid) -> replica    frees the request's slot

Work is counted in decoded tokens: the expected ones, plus PREFILL_COST for each prompt token that is not cached there.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence

from marsrl.rollout.engines.protocol import DecodeRequest

PREFILL_COST = 0.1
"""Work of a prompt token relative to a decoded one: decoding is memory-bound, prefill is not."""

_MAX_HOMES = 1 << 16  # samples whose replica is remembered; forgetting the oldest costs a prefill


class Dispatcher:
    """Queues in front of replicas; see the module.

    slots: maximum number of requests that a replica decodes at a time; None: no limit, so nothing waits.
    """

    def __init__(self, num_replicas: int, slots: int | None) -> None:
        self._slots = slots
        self._queues: list[list[tuple[float, int, DecodeRequest]]] = [[] for _ in range(num_replicas)]  # heaps
        self._work = [0.0] * num_replicas  # work of queued and running requests, by replica
        self._running: list[set[str]] = [set() for _ in range(num_replicas)]
        self._place: dict[str, tuple[int, float]] = {}  # uid of a queued or running request: (replica, work)
        self._homes: dict[str, int] = {}  # uid: replica that has its prefix cached
        self._open = list(range(num_replicas))  # replicas with an engine, in order
        self._ticket = itertools.count()
        self.num_waiting = 0  # requests in all queues

    @property
    def busy(self) -> list[int]:
        """Return the replicas with requests under way."""
        return [replica for replica, running in enumerate(self._running) if running]

    def add(self, requests: Sequence[DecodeRequest]) -> None:
        """Queue requests; raises ValueError if a uid is already under way or appears twice."""
        strangers: dict[str, list[DecodeRequest]] = defaultdict(list)
        uids = {request.uid for request in requests}
        if len(uids) < len(requests):
            raise ValueError(f"{len(requests)} requests have only {len(uids)} distinct uids; expected one per request")
        for request in requests:
            if request.uid in self._place:
                raise ValueError(
                    f"request {request.uid} is already being decoded; expected a request that is not under way"
                )
            home = self._homes.get(request.uid)
            if home is None:
                strangers[request.affinity].append(request)
                continue
            least = self._least()
            stays = self._work[home] <= self._work[least] + PREFILL_COST * len(request.token_ids)
            self._queue(request, home if stays else least, is_cached=stays)
        cost = {key: sum(_cost(request) for request in group) for key, group in strangers.items()}
        for key in sorted(strangers, key=lambda key: -cost[key]):  # stable: ties keep the given order
            replica = self._least()
            for request in strangers[key]:
                self._queue(request, replica, is_cached=False)

    def take(self, closed: Collection[int] = (), *, at_once: bool = False) -> dict[int, list[DecodeRequest]]:
        """Return {replica: requests to send now, longest first}, for replicas that are not closed.

        at_once: send whole queues, even if the replica has too few slots.
        """
        shares: dict[int, list[DecodeRequest]] = {}
        if not self.num_waiting:
            return shares
        replicas = [r for r in self._open if r not in closed]
        for replica in replicas:
            while self._queues[replica] and (at_once or self._is_free(replica)):
                self._send(heapq.heappop(self._queues[replica])[2], replica, shares)
        while self.num_waiting:
            idle = min((r for r in replicas if self._is_free(r)), key=lambda r: self._work[r], default=None)
            if idle is None:
                break
            fullest = max((r for r, queue in enumerate(self._queues) if queue), key=lambda r: self._work[r])
            request = heapq.heappop(self._queues[fullest])[2]
            self._work[fullest] -= self._place.pop(request.uid)[1]
            self._place[request.uid] = (idle, _cost(request))
            self._work[idle] += _cost(request)
            self._send(request, idle, shares)
        return shares

    def end(self, uid: str) -> int:
        """Remove a finished request and return its replica."""
        replica, work = self._place.pop(uid)
        self._work[replica] -= work
        self._running[replica].discard(uid)
        return replica

    def open(self, replica: int) -> None:
        """Open this replica to requests; it may be a new one (the next number)."""
        while replica >= len(self._queues):
            self._queues.append([])
            self._work.append(0.0)
            self._running.append(set())
        self._open = sorted({*self._open, replica})

    def close(self, replica: int) -> None:
        """Send no more requests to this replica, and move its queue to others. At least one stays open."""
        self._open = [each for each in self._open if each != replica]
        self.forget_homes(replica)
        waiting = [entry[2] for entry in sorted(self._queues[replica], key=lambda entry: entry[1])]
        self._queues[replica].clear()
        self.num_waiting -= len(waiting)
        for request in waiting:
            self.end(request.uid)
        self.add(waiting)

    def drop_waiting(self, adapter: str | None = None) -> list[DecodeRequest]:
        """Remove and return unsent requests that use the adapter (None: all)."""
        waiting = [entry for queue in self._queues for entry in queue if entry[2].uses(adapter)]
        for queue in self._queues:
            queue[:] = [entry for entry in queue if not entry[2].uses(adapter)]
            heapq.heapify(queue)
        self.num_waiting -= len(waiting)
        dropped = [request for _, _, request in sorted(waiting, key=lambda entry: entry[1])]
        for request in dropped:
            self.end(request.uid)
        return dropped

    def forget_homes(self, replica: int | None = None) -> None:
        """Forget the cached prefixes of a replica (None: all), whose cache was emptied."""
        self._homes = {} if replica is None else {uid: home for uid, home in self._homes.items() if home != replica}

    def _least(self) -> int:
        return min(self._open, key=self._work.__getitem__)

    def _is_free(self, replica: int) -> bool:
        return self._slots is None or len(self._running[replica]) < self._slots

    def _queue(self, request: DecodeRequest, replica: int, *, is_cached: bool) -> None:
        work = _expected(request) if is_cached else _cost(request)
        heapq.heappush(self._queues[replica], (-_expected(request), next(self._ticket), request))
        self.num_waiting += 1
        self._place[request.uid] = (replica, work)
        self._work[replica] += work

    def _send(self, request: DecodeRequest, replica: int, shares: dict[int, list[DecodeRequest]]) -> None:
        self.num_waiting -= 1
        self._running[replica].add(request.uid)
        self._homes.pop(request.uid, None)  # reinserted at the end: the oldest entries are dropped first
        self._homes[request.uid] = replica
        if len(self._homes) > _MAX_HOMES:
            del self._homes[next(iter(self._homes))]
        shares.setdefault(replica, []).append(request)


def _expected(request: DecodeRequest) -> float:
    return request.max_new_tokens if request.expected_new_tokens is None else request.expected_new_tokens


def _cost(request: DecodeRequest) -> float:
    return _expected(request) + PREFILL_COST * len(request.token_ids)
