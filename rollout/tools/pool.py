"""Calls of tools side by side, none of which can fail, hang or flood its caller.

    submit(ToolCall) -> queue of the tool -> thread -> Tool.run -> text or parts, cut at the cap -> Future[ToolOutput]
                |-> cache: the same call was answered before, or is under way: it is not run again

Threads, because the tools that ship wait for sockets and for SQLite, which both let other threads run. A thread cannot be
killed: one that runs longer than timeout_s is given up, its call is an error, and another thread takes its place; a thread of
the pool's own, the watch, sees to it. At most `concurrency` threads of a tool work and as many are given up, so it has
2 x concurrency threads; where that many hang, further calls are refused until one of them ends. They are daemons: a hung one
does not hold up the end of the process.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from marsrl.rollout.fitting import even_shares
from marsrl.rollout.tools.config import ToolLimits
from marsrl.rollout.tools.protocol import CountingTool, Tool, ToolError
from marsrl.rollout.types import ToolCall, ToolOutput

_log = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The name in metrics of all tools that do not exist: models make names up without end."""

_MOST_ARGUMENT_CHARS = 1 << 20
_MOST_SHOWN = 200  # characters of an error or a name in a text for the model
_ENTRY_BYTES = 200  # of an entry of the cache beside its text, about
_COUNTS = ("calls", "errors", "timeouts", "cached", "seconds", "truncated", "parts")

_Key = tuple[str, str]  # tool, arguments in one spelling


class _Cache:
    """Outputs by call, those used last; of one tool."""

    def __init__(self, limits: ToolLimits) -> None:
        self._most_bytes, self._most_entries = limits.cache_mib << 20, limits.cache_entries
        self._outputs: OrderedDict[_Key, ToolOutput] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: _Key) -> ToolOutput | None:
        output = self._outputs.get(key)
        if output is not None:
            self._outputs.move_to_end(key)
        return output

    def put(self, key: _Key, output: ToolOutput) -> None:
        if (size := _size(key, output)) > self._most_bytes or key in self._outputs:
            return
        self._outputs[key] = output
        self._num_bytes += size
        while self._num_bytes > self._most_bytes or len(self._outputs) > self._most_entries:
            self._num_bytes -= _size(*self._outputs.popitem(last=False))


@dataclass(eq=False)
class _Run:
    """One run of a tool. futures: of the calls that it answers. start: monotonic seconds, in thread."""

    key: _Key
    arguments: Mapping[str, object]
    futures: list[Future[ToolOutput]]
    start: float = math.inf
    thread: threading.Thread | None = None
    is_given_up: bool = False


@dataclass(eq=False)
class _Lane:
    """One tool with its threads, queue and memory."""

    tool: Tool
    limits: ToolLimits
    cache: _Cache
    has_work: threading.Condition  # of the pool's lock; told once a run
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0.0))
    queue: deque[_Run] = field(default_factory=deque)
    running: list[_Run] = field(default_factory=list)
    shared: dict[_Key, _Run] = field(default_factory=dict)  # runs that a further call of the same may join
    threads: list[threading.Thread] = field(default_factory=list)  # none that was given up
    num_idle: int = 0
    num_hung: int = 0
    last_error: str = ""


class ToolPool:
    """Runs calls of tools, each within its limits (see the file).

    pool = ToolPool({"search": tool}, {"search": limits})
    pool.submit(ToolCall("000017/search:0/0/search#0", "search", '{"query": "capital of Peru"}')).result()
    """

    def __init__(self, tools: Mapping[str, Tool], limits: Mapping[str, ToolLimits] | None = None) -> None:
        """limits: of each tool by name; a tool that is not named has the defaults."""
        if UNKNOWN in tools:
            raise ValueError(f"ToolPool: no tool can be called {UNKNOWN!r}, which counts those that do not exist")
        limits = limits or {}
        # Guards everything; callbacks of futures run under it, and may submit. Each condition of it tells those whom it concerns:
        # one for all woke every idle thread at each of 64 calls, and took longer than the calls.
        self._lock = threading.RLock()
        self._lanes: dict[str, _Lane] = {}
        for name, tool in tools.items():
            bounds = limits.get(name, ToolLimits())
            self._lanes[name] = _Lane(tool, bounds, _Cache(bounds), threading.Condition(self._lock))
        self._unknown = dict.fromkeys(_COUNTS, 0.0)
        self._watch: threading.Thread | None = None
        self._watched_until = math.inf  # monotonic seconds: when the watch wakes by itself
        self._is_sooner = threading.Condition(self._lock)  # tells the watch that it would wake too late
        self._is_closed = False

    def submit(self, call: ToolCall) -> Future[ToolOutput]:
        """Begin a call. Whatever is wrong with it is its output; the future is cancelled where the pool is closed before.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[ToolOutput] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("ToolPool: submit after close")
            if self._watch is None:
                self._watch = threading.Thread(target=self._give_up_late_ones, name="marsrl-tools", daemon=True)
                self._watch.start()
            self._begin(call, future)
        return future

    def argument(self, name: str) -> str:
        """The name of the one text that a tool can be called with."""
        return self._lanes[name].tool.argument

    def take_counts(self) -> dict[str, float]:
        """Metrics since the last call, tools/<name>/...: of calls that ended, seconds of runs, outputs that were cut, parts."""
        with self._lock:
            for lane in self._lanes.values():
                _add_own_counts(lane)
            taken = {name: lane.counts for name, lane in self._lanes.items()}
            if self._unknown["calls"]:
                taken[UNKNOWN] = self._unknown
            metrics = {f"tools/{name}/{key}": value for name, counts in taken.items() for key, value in counts.items()}
            for lane in self._lanes.values():
                lane.counts = dict.fromkeys(_COUNTS, 0.0)
            self._unknown = dict.fromkeys(_COUNTS, 0.0)
        return metrics

    def last_errors(self) -> dict[str, str]:
        """The last error of each tool that had one, by its name."""
        with self._lock:
            return {name: lane.last_error for name, lane in self._lanes.items() if lane.last_error}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Calls in the body find nothing that was kept of earlier ones, and leave neither outputs nor counts behind.

        A call from before that ends in the body is counted there.
        """

        def swap(held: Mapping[str, tuple[_Cache, dict[str, float]]], unknown: dict[str, float]) -> None:
            with self._lock:
                for name, (cache, counts) in held.items():
                    _add_own_counts(self._lanes[name])
                    self._lanes[name].cache, self._lanes[name].counts = cache, counts
                self._unknown = unknown

        with self._lock:
            before = {name: (lane.cache, lane.counts) for name, lane in self._lanes.items()}
            unknown = self._unknown
        none = lambda: dict.fromkeys(_COUNTS, 0.0)  # noqa: E731
        swap({name: (_Cache(lane.limits), none()) for name, lane in self._lanes.items()}, none())
        try:
            yield
        finally:
            swap(before, unknown)

    def close(self) -> None:
        """Drop what is under way and close the tools; may be called twice. Hung threads are left to end by themselves."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for lane in self._lanes.values():
                for run in (*lane.queue, *lane.running):
                    for future in run.futures:
                        future.cancel()
                        future.set_running_or_notify_cancel()  # tells who waits for it
                    run.futures = []
                lane.queue.clear()
            busy = {run.thread for lane in self._lanes.values() for run in lane.running}
            idle = [thread for lane in self._lanes.values() for thread in lane.threads if thread not in busy]
            for lane in self._lanes.values():
                lane.has_work.notify_all()
            self._is_sooner.notify()
        for thread in [*idle, *([self._watch] if self._watch is not None else [])]:
            thread.join()
        with ExitStack() as stack:
            for lane in self._lanes.values():
                stack.callback(lane.tool.close)

    # All below: with the lock held.

    def _begin(self, call: ToolCall, future: Future[ToolOutput]) -> None:
        lane = self._lanes.get(call.tool)
        if lane is None:
            known = ", ".join(self._lanes) or "none"
            text = f"there is no tool {call.tool[:_MOST_SHOWN]!r}; there are: {known}"
            self._end(self._unknown, future, _error(text))
            return
        try:
            arguments, spelled = _arguments(call.arguments)
        except ToolError as error:
            self._end(lane.counts, future, _error(str(error)))
            return
        key = (call.tool, spelled)
        if lane.tool.is_deterministic:
            if (output := lane.cache.get(key)) is not None:
                lane.counts["cached"] += 1
                self._end(lane.counts, future, output)
                return
            if (same := lane.shared.get(key)) is not None:
                lane.counts["cached"] += 1
                same.futures.append(future)
                return
        if lane.num_hung >= lane.limits.concurrency:
            self._end(lane.counts, future, _error(_hangs(call.tool, lane)))
            return
        run = _Run(key, arguments, [future])
        if lane.tool.is_deterministic:
            lane.shared[key] = run
        lane.queue.append(run)
        lane.has_work.notify()
        self._start_threads(lane)

    def _start_threads(self, lane: _Lane) -> None:
        """One for each run that waits and has none, as far as there may be."""
        while len(lane.queue) > lane.num_idle and len(lane.threads) < lane.limits.concurrency:
            thread = threading.Thread(target=self._work, args=(lane,), name=f"marsrl-{lane.tool.name}", daemon=True)
            lane.threads.append(thread)
            lane.num_idle += 1
            thread.start()

    def _give_up(self, now: float) -> None:
        """Runs that take longer than they may are errors, and their threads no longer the pool's."""
        for name, lane in self._lanes.items():
            late = [run for run in lane.running if now >= run.start + lane.limits.timeout_s]
            for run in late:
                lane.running.remove(run)
                lane.threads = [thread for thread in lane.threads if thread is not run.thread]
                lane.num_hung += 1
                lane.counts["timeouts"] += len(run.futures)
                lane.counts["seconds"] += lane.limits.timeout_s
                run.is_given_up = True
                text = f"{name} did not answer within {lane.limits.timeout_s:g} s"
                self._end_run(lane, run, replace(_error(text), seconds=lane.limits.timeout_s))
            if late and lane.num_hung >= lane.limits.concurrency:
                while lane.queue:
                    self._end_run(lane, lane.queue.popleft(), _error(_hangs(name, lane)))
            if late:
                self._start_threads(lane)

    def _end_run(self, lane: _Lane, run: _Run, output: ToolOutput) -> None:
        if lane.shared.get(run.key) is run:
            del lane.shared[run.key]
        for future in run.futures:
            self._end(lane.counts, future, output)
            output = replace(output, seconds=0.0)  # one run, however many calls it answers
        if output.is_error:
            lane.last_error = output.text
        run.futures = []

    def _end(self, counts: dict[str, float], future: Future[ToolOutput], output: ToolOutput) -> None:
        counts["calls"] += 1
        counts["errors"] += output.is_error
        counts["parts"] += len(output.part_ends)
        if future.set_running_or_notify_cancel():  # else the pool was closed, or its caller wants it no more
            future.set_result(output)

    # In threads of the pool's.

    def _give_up_late_ones(self) -> None:
        """The watch: until the pool is closed."""
        with self._lock:
            while not self._is_closed:
                now = time.monotonic()
                self._give_up(now)
                ends = [run.start + lane.limits.timeout_s for lane in self._lanes.values() for run in lane.running]
                self._watched_until = min(ends, default=math.inf)
                self._is_sooner.wait(self._watched_until - now if ends else None)

    def _work(self, lane: _Lane) -> None:
        """Run after run of one tool, until the pool is closed or this thread is given up."""
        while True:
            with self._lock:
                while not lane.queue and not self._is_closed:
                    lane.has_work.wait()
                lane.num_idle -= 1
                if self._is_closed:
                    return
                run = lane.queue.popleft()
                run.start, run.thread = time.monotonic(), threading.current_thread()
                lane.running.append(run)
                if (end := run.start + lane.limits.timeout_s) < self._watched_until:
                    self._watched_until = end
                    self._is_sooner.notify()
            output, is_cut = _output(lane, run)
            with self._lock:
                if run.is_given_up:
                    lane.num_hung -= 1
                    return
                lane.running.remove(run)
                lane.num_idle += 1
                seconds = time.monotonic() - run.start
                lane.counts["seconds"] += seconds
                lane.counts["truncated"] += is_cut
                if lane.tool.is_deterministic and not output.is_error:
                    lane.cache.put(run.key, output)
                self._end_run(lane, run, replace(output, seconds=seconds))


def _add_own_counts(lane: _Lane) -> None:
    if isinstance(lane.tool, CountingTool):
        for key, value in lane.tool.take_counts().items():
            lane.counts[key] = lane.counts.get(key, 0.0) + value


def _output(lane: _Lane, run: _Run) -> tuple[ToolOutput, bool]:
    """(the tool's output, True where it was cut); a failure of the tool is an output too."""
    name, most = lane.tool.name, lane.limits.max_output_chars
    try:
        said = lane.tool.run(run.arguments)
        parts = [said] if isinstance(said, str) else said
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"its output is {type(said).__name__}, expected text or a list of texts")
    except ToolError as error:
        return _error(str(error)), False
    except BaseException as error:  # SystemExit too: the thread would end without a word, and the call with it
        _log.warning("tool %s failed: %s", name, error, exc_info=error)
        return _error(f"{name} failed: {type(error).__name__}: {error}"), False
    kept = even_shares([len(part) for part in parts], most)
    shown = [_cut(part, length) for part, length in zip(parts, kept, strict=True)]
    is_cut = any(length < len(part) for part, length in zip(parts, kept, strict=True))
    return ToolOutput(shown[0]) if isinstance(said, str) else ToolOutput.of(shown), is_cut


def _cut(text: str, longest: int) -> str:
    shown = text[:longest].encode("utf-8", "replace").decode("utf-8")  # half of a surrogate pair has no tokens
    if len(text) <= longest:
        return shown
    return f"{shown}\n[cut: the first {longest:,} of {len(text):,} characters]"


def _error(text: str) -> ToolOutput:
    return ToolOutput(f"error: {text[: 2 * _MOST_SHOWN]}".encode("utf-8", "replace").decode("utf-8"), is_error=True)


def _hangs(name: str, lane: _Lane) -> str:
    return f"{name} is not available: {lane.num_hung} calls of it hang"


def _arguments(text: str) -> tuple[dict[str, object], str]:
    """(the arguments, the same in the one spelling that equal ones share)."""
    if len(text) > _MOST_ARGUMENT_CHARS:
        raise ToolError(f"the arguments have {len(text):,} characters, at most {_MOST_ARGUMENT_CHARS:,} are read")
    try:
        value = json.loads(text)
        spelled = json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not JSON ({str(error)[:_MOST_SHOWN]})") from None
    if not isinstance(value, dict):
        raise ToolError(f"the arguments are a JSON {type(value).__name__}, expected an object")
    return value, spelled


def _size(key: _Key, output: ToolOutput) -> int:
    """Bytes of an entry, about: Python's strings have up to 4 a character."""
    return 4 * (len(key[1]) + len(output.text)) + _ENTRY_BYTES
