"""Pool of concurrent tool calls that cannot fail, hang or flood their caller.

    submit(ToolCall) -> queue of the tool -> a thread for its run -> text or parts, cut to the limit -> Future[ToolOutput]
                |-> cache: if an equal call has ended or is running, its output is used

Threads suffice because the built-in tools wait for sockets and SQLite, which both release the GIL. A thread cannot be killed, so
a timer abandons a run after timeout_s: its call becomes an error, and another run takes its place. A tool has at most
`concurrency` active runs and as many abandoned ones; at that limit further calls are rejected. The threads are daemons, so that a
hung thread does not delay the process's exit.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from marsrl.rollout.fitting import even_shares
from marsrl.rollout.tools.config import ToolLimits
from marsrl.rollout.tools.protocol import SHIPPED, Tool, ToolError
from marsrl.rollout.types import ToolCall, ToolFunction, ToolOutput

_log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Name in metrics of all unknown tools and unreadable calls, since models invent any number of names."""

_MOST_ARGUMENT_CHARS = 1 << 20
_MOST_SHOWN = 200  # characters of a name, or of a parser's message, in a text for the model
_MOST_ERROR = 400  # characters of an error
_ENTRY_BYTES = 500  # approximate size of a cache entry without its text
_COUNTS = ("calls", "errors", "timeouts", "cached", "seconds", "truncated", "parts")


class _Books:
    """A tool's counts, and an LRU cache of its outputs by arguments."""

    def __init__(self, limits: ToolLimits) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0.0)
        self._most_bytes, self._num_bytes = limits.cache_mib << 20, 0
        self._outputs: OrderedDict[str, ToolOutput] = OrderedDict()

    def take_counts(self) -> dict[str, float]:
        counts, self.counts = self.counts, dict.fromkeys(_COUNTS, 0.0)
        return counts

    def get(self, key: str) -> ToolOutput | None:
        if key in self._outputs:
            self._outputs.move_to_end(key)
        return self._outputs.get(key)

    def put(self, key: str, output: ToolOutput) -> None:
        self._outputs[key] = output
        self._num_bytes += _size(key, output)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= _size(*self._outputs.popitem(last=False))


def _size(key: str, output: ToolOutput) -> int:
    """Estimate the bytes of an entry: Python's strings use up to 4 per character."""
    return 4 * (len(key) + len(output.text)) + _ENTRY_BYTES


@dataclass(eq=False)
class _Run:
    """One run of a tool. key: canonical arguments. futures: futures of the calls that share the run."""

    key: str
    arguments: Mapping[str, object]
    futures: list[Future[ToolOutput]]
    timer: threading.Timer | None = None  # abandons the run


@dataclass(eq=False)
class _Lane:
    """One tool with its runs. shared: runs that further equal calls can join, by key."""

    name: str
    tool: Tool
    limits: ToolLimits
    books: _Books
    queue: deque[_Run] = field(default_factory=deque)
    running: list[_Run] = field(default_factory=list)
    shared: dict[str, _Run] = field(default_factory=dict)
    num_hung: int = 0
    last_error: str = ""

    def late(self) -> ToolOutput:
        return _error(f"{self.name} did not answer within {self.limits.timeout_s:g} s")

    def hangs(self) -> ToolOutput:
        return _error(f"{self.name} is not available: {self.num_hung} calls of it hang")


class ToolPool:
    """Pool that runs tool calls within their limits; see the module.

    pool = ToolPool({"search": tool}, {"search": limits})
    pool.submit(ToolCall("000017/search:0/0/search#0", "search", '{"query": "capital of Peru"}')).result()
    """

    def __init__(self, tools: Mapping[str, Tool], limits: Mapping[str, ToolLimits] | None = None) -> None:
        """Create the pool. limits: limits by tool name; tools without an entry have the defaults."""
        limits = dict.fromkeys(tools, ToolLimits()) | dict(limits or {})
        self._lock = threading.RLock()  # guards all fields; futures' callbacks hold it and may submit
        self._lanes = {name: _Lane(name, tool, limits[name], _Books(limits[name])) for name, tool in tools.items()}
        self._unknown = _Books(ToolLimits())
        self._is_closed = False

    def submit(self, call: ToolCall) -> Future[ToolOutput]:
        """Start a call. Errors become its output; the future is cancelled if the pool closes first."""
        future: Future[ToolOutput] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("ToolPool.submit: the pool is closed")
            if call.tool in self._lanes:
                self._begin(self._lanes[call.tool], call, future)
            else:
                text = (
                    f"there is no tool {call.tool[:_MOST_SHOWN]!r}; expected one of {', '.join(self._lanes) or 'none'}"
                )
                _end(self._unknown, future, _error(text))
        return future

    def count_unmade(self, number: int) -> None:
        """Count calls that were not executed: unreadable ones, and calls of tools that the agent does not have."""
        with self._lock:
            self._unknown.counts["calls"] += number
            self._unknown.counts["errors"] += number

    def functions(self, name: str) -> Sequence[ToolFunction]:
        """Return the functions of a tool, as chat templates show them."""
        tool = self._lanes[name].tool
        return tool.functions if hasattr(tool, "functions") else (SHIPPED[name],)

    def take_counts(self) -> dict[str, float]:
        """Return metrics since the last call, by name: tools/<name>/calls, errors and so on, and the tools' own counts."""
        with self._lock:
            self._add_own_counts()
            counts = {lane.name: lane.books.take_counts() for lane in self._lanes.values()}
            unknown = self._unknown.take_counts()
        counts |= {UNKNOWN: unknown} if unknown["calls"] else {}
        return {f"tools/{name}/{key}": value for name, counted in counts.items() for key, value in counted.items()}

    def last_errors(self) -> dict[str, str]:
        """Return the last error of each tool that had one, by tool name."""
        with self._lock:
            return {name: lane.last_error for name, lane in self._lanes.items() if lane.last_error}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Give calls inside the block their own cache and counts, which are dropped at its end.

        Earlier calls that end inside the block are counted there.
        """
        with self._lock:
            self._add_own_counts()
            before, unknown = {name: lane.books for name, lane in self._lanes.items()}, self._unknown
            self._unknown = _Books(ToolLimits())
            for lane in self._lanes.values():
                lane.books = _Books(lane.limits)
        try:
            yield
        finally:
            with self._lock:
                self._add_own_counts()
                self._unknown = unknown
                for name, books in before.items():
                    self._lanes[name].books = books

    def close(self) -> None:
        """Drop pending calls and close the tools; may be called twice. Active runs end by themselves."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for lane in self._lanes.values():
                for run in (*lane.queue, *lane.running):
                    for future in run.futures:
                        future.cancel()
                        future.set_running_or_notify_cancel()  # notifies threads that wait for the future
                    run.futures = []
                    if run.timer is not None:
                        run.timer.cancel()
                lane.queue.clear()
        with ExitStack() as stack:
            for lane in self._lanes.values():
                stack.callback(lane.tool.close)

    # The next three methods require the lock.

    def _begin(self, lane: _Lane, call: ToolCall, future: Future[ToolOutput]) -> None:
        try:
            arguments, key = _arguments(call.arguments)
        except ToolError as error:
            return _end(lane.books, future, _error(str(error)))
        if lane.tool.is_deterministic:
            if (output := lane.books.get(key)) is not None:
                lane.books.counts["cached"] += 1
                return _end(lane.books, future, output)
            if (same := lane.shared.get(key)) is not None:
                lane.books.counts["cached"] += 1
                return same.futures.append(future)
        if lane.num_hung >= lane.limits.concurrency:
            return _end(lane.books, future, lane.hangs())
        run = _Run(key, arguments, [future])
        if lane.tool.is_deterministic:
            lane.shared[key] = run
        lane.queue.append(run)
        self._start_runs(lane)

    def _start_runs(self, lane: _Lane) -> None:
        """Start waiting runs up to the limit; while too many runs hang, end the waiting ones with an error instead."""
        while lane.queue and lane.num_hung >= lane.limits.concurrency:
            _end_run(lane, lane.queue.popleft(), lane.hangs())
        while lane.queue and len(lane.running) < lane.limits.concurrency:
            run = lane.queue.popleft()
            lane.running.append(run)
            run.timer = threading.Timer(lane.limits.timeout_s, self._give_up, (lane, run))
            run.timer.daemon = True
            run.timer.start()
            threading.Thread(target=self._work, args=(lane, run), name=f"marsrl-{lane.name}", daemon=True).start()

    def _add_own_counts(self) -> None:
        for lane in self._lanes.values():
            for key, value in (lane.tool.take_counts() if hasattr(lane.tool, "take_counts") else {}).items():
                lane.books.counts[key] = lane.books.counts.get(key, 0.0) + value

    # The methods below run in the threads of timers and runs, and acquire the lock themselves.

    def _give_up(self, lane: _Lane, run: _Run) -> None:
        """End an overdue run with an error, and abandon its thread."""
        with self._lock:
            if run not in lane.running:
                return  # the run has just ended
            lane.running.remove(run)
            lane.num_hung += 1
            lane.books.counts["timeouts"] += len(run.futures)
            lane.books.counts["seconds"] += lane.limits.timeout_s
            _end_run(lane, run, replace(lane.late(), seconds=lane.limits.timeout_s))
            self._start_runs(lane)

    def _work(self, lane: _Lane, run: _Run) -> None:
        begin = time.monotonic()
        output, is_cut = _output(lane, run)
        seconds = time.monotonic() - begin
        with self._lock:
            if run not in lane.running:  # the run was abandoned
                lane.num_hung -= 1
                return
            assert run.timer is not None
            run.timer.cancel()
            lane.running.remove(run)
            lane.books.counts["seconds"] += seconds
            lane.books.counts["truncated"] += is_cut
            if output.is_error and seconds >= lane.limits.timeout_s:  # the tool's own limit was reached first
                lane.books.counts["timeouts"] += len(run.futures)
                output = lane.late()
            if lane.tool.is_deterministic and not output.is_error:
                lane.books.put(run.key, output)
            _end_run(lane, run, replace(output, seconds=seconds))
            self._start_runs(lane)


def _end_run(lane: _Lane, run: _Run, output: ToolOutput) -> None:
    if lane.shared.get(run.key) is run:
        del lane.shared[run.key]
    for future in run.futures:
        _end(lane.books, future, output)
        output = replace(output, seconds=0.0)  # the time of a shared run is counted for one of its calls only
    if output.is_error:
        lane.last_error = output.text
    run.futures = []


def _end(books: _Books, future: Future[ToolOutput], output: ToolOutput) -> None:
    books.counts["calls"] += 1
    books.counts["errors"] += output.is_error
    books.counts["parts"] += len(output.part_ends)
    if future.set_running_or_notify_cancel():  # otherwise the pool was closed, or the caller cancelled it
        future.set_result(output)


def _output(lane: _Lane, run: _Run) -> tuple[ToolOutput, bool]:
    """Return (the tool's output, True if truncated); a failure of the tool is an output too."""
    try:
        result = lane.tool.run(run.arguments)
        parts = [result] if isinstance(result, str) else result
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"its output is {type(result).__name__}, expected text or a list of texts")
    except ToolError as error:
        return _error(str(error)), False
    except BaseException as error:
        # SystemExit would end the thread silently, and the call would never return.
        _log.warning("tool %s failed: %s", lane.name, error, exc_info=error)
        return _error(f"{lane.name} failed: {type(error).__name__}: {error}"), False
    kept = even_shares([len(part) for part in parts], lane.limits.max_output_chars)
    shown = [_cut(part, length) for part, length in zip(parts, kept, strict=True)]
    is_cut = any(length < len(part) for part, length in zip(parts, kept, strict=True))
    return ToolOutput(shown[0]) if isinstance(result, str) else ToolOutput.of(shown), is_cut


def _cut(text: str, longest: int) -> str:
    shown = text[:longest].encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be tokenised
    if len(text) <= longest:
        return shown
    return f"{shown}\n[cut: the first {longest:,} of {len(text):,} characters]"


def _error(text: str) -> ToolOutput:
    return ToolOutput(f"error: {_cut(text, _MOST_ERROR)}", is_error=True)


def _arguments(text: str) -> tuple[dict[str, object], str]:
    """Parse arguments; return (the arguments, their canonical spelling)."""
    if len(text) > _MOST_ARGUMENT_CHARS:
        raise ToolError(f"the arguments have {len(text):,} characters, expected at most {_MOST_ARGUMENT_CHARS:,}")
    try:
        value = json.loads(text)
        spelled = json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON ({str(error)[:_MOST_SHOWN]})") from None
    if not isinstance(value, dict):
        raise ToolError(f"the arguments are a JSON {type(value).__name__}, expected an object")
    return value, spelled
