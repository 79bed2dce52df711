"""Shares of an engine's time: each step's seconds are split evenly among the requests that got a token in it.

    shares.add("a"); shares.add("b")
    shares.step(0.2); shares.end("a")   -> 0.1
    shares.step(0.2); shares.end("b")   -> 0.1 + 0.2

The shares of all requests add up to the engine's busy seconds, so they measure cost, not waiting time. The split is even, because
a decoding step reads all weights for all sequences together. A prefill in a step increases the share of every request in it.
"""

from __future__ import annotations

from collections import deque


class TimeShares:
    """Time shares of the requests in an engine. Costs O(1) per step.

    slots: maximum number of requests in a step; further requests wait, in order. None: no limit. Source: virtual time of fair
    queueing (Parekh and Gallager, 1993).
    """

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots
        self._each_s = 0.0  # seconds of a request that was in every step so far
        self._since: dict[str, float] = {}  # running requests, with the value of _each_s at their start
        self._waiting: deque[str] = deque()

    def add(self, uid: str) -> None:
        """Add a request, which is decoded as soon as there is a slot."""
        self._waiting.append(uid)
        self._fill()

    def step(self, seconds: float) -> None:
        """Split the seconds of an engine step evenly among the running requests."""
        if self._since:
            self._each_s += seconds / len(self._since)

    def end(self, uid: str) -> float:
        """Remove a finished request and return its seconds; 0 if it was in no step."""
        since = self._since.pop(uid, None)
        if since is None:
            if uid in self._waiting:
                self._waiting.remove(uid)
            return 0.0
        self._fill()
        return self._each_s - since

    def _fill(self) -> None:
        while self._waiting and (self._slots is None or len(self._since) < self._slots):
            self._since[self._waiting.popleft()] = self._each_s
