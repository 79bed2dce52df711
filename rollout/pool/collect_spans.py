"""Joins the many short calls of collect into spans of a timeline."""

from __future__ import annotations

from collections.abc import Callable

_SPAN_S, _PAUSE_S = 1.0, 0.05


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
