"""Merges many short `collect` calls into spans of the trace."""

from __future__ import annotations

from collections.abc import Callable

_SPAN_S, _PAUSE_S = 1.0, 0.05


class CollectSpans:
    """Merges back-to-back `collect` calls of a replica into spans of at most a second.

        spans.note(replica, start, end)     # on every call
        spans.end()                         # no call follows for now: report the open spans

    tell: called with (replica, start, end) of each span; times as in replicas.Timed.
    """

    def __init__(self, tell: Callable[[int, float, float], None]) -> None:
        self._tell = tell
        self._held: dict[int, tuple[float, float]] = {}  # by replica: not reported yet

    def note(self, replica: int, start: float, end: float) -> None:
        """Add one call."""
        first, last = self._held.get(replica, (start, start))
        if start - last > _PAUSE_S or end - first > _SPAN_S:
            self._end(replica)
            first = start
        self._held[replica] = (first, max(first, end))  # the wall clock may have been set back since the first

    def end(self) -> None:
        """Report the open span of every replica."""
        for replica in list(self._held):
            self._end(replica)

    def _end(self, replica: int) -> None:
        if replica in self._held:
            self._tell(replica, *self._held.pop(replica))
