"""Timeline of a run, trace.json, in the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

A lane is "kind/which": engine/0, rank/1, credit/main, reward/pool, sync/main. Perfetto shows a process for each kind and a
thread for each lane. The beginning of a step or stage is marked over all lanes (lanes mark/step, mark/stage). Format:
"Trace Event Format" (Google), complete events ("ph": "X"), instant events ("i") and metadata events ("M").
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from marsrl.trainer.runs.directory import write_atomically

MARKS = "mark"  # kind of the lanes that mark beginnings of steps and stages
Argument = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Span:
    """Activity in one lane. start_s, end_s: seconds since the trace began; time.time() in a span from `take`."""

    lane: str
    name: str
    start_s: float
    end_s: float
    arguments: Mapping[str, Argument] = field(default_factory=dict)


class TraceLog:
    """Collector of spans from any thread; `save` writes them.

        trace = TraceLog(run.trace)
        with trace.span("rank/0", "step", step=3):
            learner.train_step(updates)
        trace.mark("step", 4)
        trace.save()

    path: file to write; None if `take` passes the spans to another trace.
    zero: time.monotonic() at the beginning of the trace.

    The clock is time.monotonic(), which never jumps. `add_wall` adds spans timed by other processes (engines, perhaps on other
    hosts); their error is the difference between the hosts' wall clocks. If the file exists (a resumed run), its spans are kept
    and the clock continues after them.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._spans: list[Span] = read_trace(path) if path is not None and path.exists() else []
        self._num_marks = Counter(span.lane for span in self._spans if span.lane.startswith(f"{MARKS}/"))
        self.zero = time.monotonic() - max((span.end_s for span in self._spans), default=0.0)

    def add(
        self, lane: str, name: str, start: float, end: float, arguments: Mapping[str, Argument] | None = None
    ) -> None:
        """Record work done between two readings of time.monotonic()."""
        span = Span(lane, name, start - self.zero, end - self.zero, dict(arguments or {}))
        with self._lock:
            self._spans.append(span)

    def add_wall(self, span: Span) -> None:
        """Record work done between two readings of time.time().

        If the clock was set back in between, the span gets length 0.
        """
        ahead = _wall_clock_ahead()
        self.add(span.lane, span.name, span.start_s - ahead, max(span.start_s, span.end_s) - ahead, span.arguments)

    def mark(self, kind: str, number: int | None = None) -> None:
        """Mark the beginning of a step or stage with this number; None: the next number in this trace."""
        now_s, lane = time.monotonic(), f"{MARKS}/{kind}"
        with self._lock:
            self._num_marks[lane] += 1
            number = number or self._num_marks[lane]
        self.add(lane, f"{kind} {number}", now_s, now_s)

    def take(self) -> list[Span]:
        """Return and remove everything recorded so far, for `add_wall` of another process's trace."""
        with self._lock:
            spans, self._spans = self._spans, []
        ahead = _wall_clock_ahead() + self.zero
        return [replace(span, start_s=span.start_s + ahead, end_s=span.end_s + ahead) for span in spans]

    @contextmanager
    def span(self, lane: str, name: str, **arguments: Argument) -> Iterator[None]:
        """Record the body's time, even if it raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(lane, name, start, time.monotonic(), arguments)

    def save(self) -> None:
        """Write everything recorded so far, atomically."""
        assert self._path is not None, "a trace without a path is handed on, not saved"
        with self._lock:
            spans = list(self._spans)
        content = json.dumps({"traceEvents": _events(spans), "displayTimeUnit": "ms"}, allow_nan=False)
        write_atomically(self._path, content.encode("ascii"))


def _wall_clock_ahead() -> float:
    """Return time.time() - time.monotonic() from the quickest of several readings: a thread may be delayed between the two."""
    readings = []
    for _ in range(5):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def read_trace(path: Path) -> list[Span]:
    """Read the spans of a trace.json written by TraceLog."""
    try:
        events = json.loads(path.read_bytes())["traceEvents"]
        lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        return [
            Span(lanes[e["tid"]], e["name"], e["ts"] / 1e6, (e["ts"] + e.get("dur", 0)) / 1e6, e["args"])
            for e in events
            if e["ph"] in ("X", "i")
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a trace of a run ({error!r}); move it away") from error


def _events(spans: list[Span]) -> list[dict[str, object]]:
    lanes = sorted({span.lane for span in spans}, key=_natural)
    kinds = list(dict.fromkeys(lane.partition("/")[0] for lane in lanes))
    # Start at 1, because Perfetto hides process 0.
    process = {lane: kinds.index(lane.partition("/")[0]) + 1 for lane in lanes}
    thread = {lane: index + 1 for index, lane in enumerate(lanes)}
    events: list[dict[str, object]] = []
    for index, kind in enumerate(kinds, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": index, "tid": 0, "args": {"name": kind}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": index, "tid": 0, "args": {"sort_index": index}})
    for lane in lanes:
        where = {"pid": process[lane], "tid": thread[lane]}
        events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane}})
        events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread[lane]}})
    for span in sorted(spans, key=lambda s: (s.start_s, -s.end_s)):
        start, duration = round(span.start_s * 1e6, 3), round((span.end_s - span.start_s) * 1e6, 3)
        where = {"pid": process[span.lane], "tid": thread[span.lane]}
        arguments = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in span.arguments.items()}
        phase: dict[str, object] = {"ph": "X", "dur": duration}
        if span.lane.startswith(f"{MARKS}/"):
            phase = {"ph": "i", "s": "g"}  # an instant event over all lanes
        events.append({**phase, "name": span.name, "cat": "marsrl", "ts": start, **where, "args": arguments})
    return events


def _natural(lane: str) -> tuple[str, int, str]:
    """Return a sort key that puts engine/2 before engine/10."""
    kind, _, which = lane.partition("/")
    return kind, int(which) if which.isdecimal() else -1, which
