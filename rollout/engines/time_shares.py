"""Divides an engine's time: the seconds of each step, in even parts, among the requests that got a token in it.

    shares.add("a"); shares.add("b")
    shares.step(0.2); shares.end("a")   -> 0.1
    shares.step(0.2); shares.end("b")   -> 0.1 + 0.2

So the parts of all requests add up to the seconds for which the engine worked, whatever the batch was: what they cost, not
what they waited. Even parts, because a decoding step takes about as long for each sequence in it: it reads all weights for
all of them. A prompt that is computed in a step lengthens it for everybody in it.
"""

from __future__ import annotations

from collections import deque


class TimeShares:
    """See the module. slots: requests in a step at most, the oldest first; None: all. Costs O(1) a step (as virtual time does
    in fair queueing: Parekh and Gallager 1993)."""

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots
        self._each_s = 0.0  # what a request that was in every step has
        self._since: dict[str, float] = {}  # of those in the steps: _each_s when they came
        self._waiting: deque[str] = deque()

    def add(self, uid: str) -> None:
        """A request that the engine decodes as soon as it has a slot."""
        self._waiting.append(uid)
        self._fill()

    def step(self, seconds: float) -> None:
        """The engine has done a step."""
        if self._since:
            self._each_s += seconds / len(self._since)

    def end(self, uid: str) -> float:
        """Seconds of a request that has ended; 0 of one that had no step."""
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
