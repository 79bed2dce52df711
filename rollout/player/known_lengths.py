"""Lengths of an agent's finished completions, and a guess from them of what is left of another."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

_MOST = 512  # completions, the latest


class KnownLengths:
    """Lengths in tokens of an agent's latest finished completions."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        if len(self._latest) == _MOST:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(length)
        insort(self._sorted, length)

    def expected_rest(self, known: int) -> float | None:
        """Mean of what is left of those that got further than `known` tokens; None: none did."""
        longer = self._sorted[bisect_right(self._sorted, known) :]
        return sum(longer) / len(longer) - known if longer else None
