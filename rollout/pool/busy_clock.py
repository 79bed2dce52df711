"""How long replicas had something to decode: what rollout.rebalance goes by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection


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
