"""Times of the replicas' calls: busy seconds (rollout.rebalance goes by them) and spans for a timeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

_SPAN_S, _PAUSE_S = 1.0, 0.05


class BusyClock:
    """Seconds of all replicas added up. Who notes and who takes may be two threads.

        busy.note([0, 2])      whenever replicas begin or end
        busy.take_s()          -> 2.5

    clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}  # of those that decode
        self._ended_s = 0.0
        self._lock = threading.Lock()

    def note(self, busy: Collection[int]) -> None:
        """These replicas decode from now on, and no others."""
        with self._lock:
            now = self._clock()
            self._ended_s += sum(now - since for replica, since in self._since.items() if replica not in busy)
            self._since = {replica: self._since.get(replica, now) for replica in busy}

    def take_s(self) -> float:
        """Seconds since the last call in which replicas had something to decode, added up."""
        with self._lock:
            now = self._clock()
            taken_s = self._ended_s + sum(now - since for since in self._since.values())
            self._ended_s, self._since = 0.0, dict.fromkeys(self._since, now)
        return taken_s


class CollectSpans:
    """Joins the calls of collect of each replica that follow each other without a pause, for a second at most.

        spans.note(replica, start, end)     # every call
        spans.end()                         # nothing follows for now: what is held is told

    tell: told (replica, start, end) of each span; times as in replicas.Timed.
    """

    def __init__(self, tell: Callable[[int, float, float], None]) -> None:
        self._tell = tell
        self._held: dict[int, tuple[float, float]] = {}  # by replica: not told yet

    def note(self, replica: int, start: float, end: float) -> None:
        """One call more."""
        first, last = self._held.get(replica, (start, start))
        if start - last > _PAUSE_S or end - first > _SPAN_S:
            self._end(replica)
            first = start
        self._held[replica] = (first, max(first, end))  # the wall clock may have been set back since the first

    def end(self) -> None:
        """Tell what is held of every replica."""
        for replica in list(self._held):
            self._end(replica)

    def _end(self, replica: int) -> None:
        if replica in self._held:
            self._tell(replica, *self._held.pop(replica))
