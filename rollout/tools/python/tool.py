"""The tool `python`: one snippet, one interpreter that was started ahead and is thrown away behind it.

    keeper -> interpreters that are ready -> a call takes one, gives it the snippet, stops it -> text
       |-> kills those that are spent, starts others, while no call is under way if nobody waits for one

Nothing is shared by two calls, so nothing has to be cleaned between them: each has a process tree, a /tmp, namespaces and, under
root, a user id of its own, which all end with it. An interpreter that forked itself for each call would start sooner, and its
children would see one another, or its own code would have to set them apart; here bubblewrap does that, and what it costs (the
start of an interpreter) is paid between the calls.

Interpreters are started by a thread of their own, the keeper: the kernel is asked to end each together with the thread that
started it (PR_SET_PDEATHSIG), so that none is left behind by a killed trainer, and threads of a ToolPool may end before.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import unicodedata
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.protocol import ToolError, text_argument
from marsrl.rollout.tools.python.cgroup import find_cgroups
from marsrl.rollout.tools.python.interpreter import Ending, Interpreter, StartError
from marsrl.rollout.tools.python.launcher import choose_launcher, how_to_have_one

_log = logging.getLogger(__name__)

_START_S = 60.0  # until an interpreter is ready, on a busy machine
_LONGEST_PAUSE_S = 60.0
_GIVES_WAY_S = 0.5
_NICE = 5
_BYTES_A_CHAR = 4  # of UTF-8, at most
_NOT_PLAIN = re.compile(r"[^\n\t -~]")


class PythonInterpreter:
    """Runs `{"code": "..."}`: what it printed, the value of its last expression, the traceback of its error. Close it."""

    name = "python"
    argument = "code"
    is_deterministic = False

    def __init__(self, config: PythonTool) -> None:
        """Raises ValueError where this machine has no sandbox, or, under strict, no whole one."""
        self._config = config
        self._launcher, missing = choose_launcher(config)
        if missing:
            _log.warning(
                "tools.python.strict=false: code of a model runs by %s, without %s; %s",
                self._launcher.name,
                ", ".join(missing),
                how_to_have_one(),
            )
        self._cgroups, reason = find_cgroups(config)
        if self._cgroups is None:
            _log.warning(
                "tools.python: no cgroup bounds a call as a whole (%s); tools.python.memory_mib holds for each process alone, so "
                "that a call may take %d times %d MiB (docs/python.md)",
                reason,
                config.processes,
                config.memory_mib,
            )
        self._changed = threading.Condition()
        self._ready: deque[Interpreter] = deque()
        self._running: set[Interpreter] = set()
        self._spent: list[Interpreter] = []  # still to be killed or waited for
        self._failure: str | None = None  # why the last one did not start
        self._closed = threading.Event()
        self._is_wanted = threading.Event()  # a call waits for an interpreter, or for the end
        self._keeper = threading.Thread(target=self._keep, name="marsrl-python", daemon=True)
        self._keeper.start()

    @property
    def sandbox(self) -> str:
        """The way that its interpreters are started (launcher.py)."""
        return self._launcher.name

    @property
    def num_ready(self) -> int:
        """Interpreters that wait for a call."""
        return len(self._ready)

    def run(self, arguments: Mapping[str, object]) -> str:
        """The output of a snippet, whatever it did.

        Raises:
            ToolError: the arguments are no snippet, or no interpreter can be had.
        """
        code = text_argument(arguments, self.argument)
        interpreter = self._take()
        try:
            ending = interpreter.run(code, self._config.wall_s, _BYTES_A_CHAR * self._config.max_output_chars)
        finally:
            with self._changed:
                self._running.remove(interpreter)
                self._spent.append(interpreter)
                self._changed.notify_all()
        return shown(ending, self._config)

    def close(self) -> None:
        """Kill every interpreter; may be called twice. Calls under way end as if their snippet had been killed."""
        with self._changed:
            self._closed.set()
            self._is_wanted.set()
            self._spent += self._ready
            self._ready.clear()
            for interpreter in self._running:
                interpreter.end()
            self._changed.notify_all()
        self._keeper.join()

    def _take(self) -> Interpreter:
        with self._changed:
            while not self._closed.is_set():
                while self._ready:
                    interpreter = self._ready.popleft()
                    self._changed.notify_all()  # the keeper: there is room for another
                    if interpreter.is_alive:  # else the machine ran out of memory, and it went first
                        self._running.add(interpreter)
                        return interpreter
                    self._spent.append(interpreter)
                if self._failure is not None:
                    raise ToolError(f"python is not available: {self._failure}")
                self._is_wanted.set()
                self._changed.wait()
        raise ToolError("python is not available: it was closed")

    # In the keeper's thread.

    def _keep(self) -> None:
        """Have as many ready as the settings say, and wait for the ends of those that are spent, until the tool is closed."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread, and of what it starts
        num_failed = 0
        while wanted := self._wait_for_room():
            failure = self._start(wanted)
            num_failed = 0 if failure is None else num_failed + 1
            if failure is not None:
                self._fail(failure, num_failed)
        while self._running or self._spent:
            self._bury()
            with self._changed:
                self._changed.wait_for(lambda: self._spent or not self._running)

    def _wait_for_room(self) -> int:
        """Number to start now, 0 when the tool is closed. They give way to calls for a little while."""
        while not self._closed.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._spent or self._room())
                is_busy = bool(self._running)
            if is_busy:
                self._is_wanted.wait(_GIVES_WAY_S)  # and not by the condition, which every call tells of its end
            if not self._closed.is_set():
                self._is_wanted.clear()
            self._bury()
            if room := self._room():
                return min(room, os.cpu_count() or 1)
        return 0

    def _room(self) -> int:
        return self._config.warm - len(self._ready)

    def _bury(self) -> None:
        with self._changed:
            spent, self._spent = self._spent, []
        for interpreter in spent:
            interpreter.kill()

    def _start(self, wanted: int) -> str | None:
        """Start so many side by side; why that failed for one of them."""
        started: list[Interpreter] = []
        failure: str | None = None
        try:
            for _ in range(wanted):
                started.append(self._launcher.start(self._config, self._cgroups))
        except OSError as error:
            failure = str(error)
        for interpreter in started:
            try:
                interpreter.wait_until_ready(_START_S)
            except (StartError, OSError) as error:
                failure = str(error)
                interpreter.kill()
            else:
                self._add(interpreter)
        return failure

    def _add(self, interpreter: Interpreter) -> None:
        with self._changed:
            self._failure = None
            (self._spent if self._closed.is_set() else self._ready).append(interpreter)
            self._changed.notify_all()

    def _fail(self, failure: str, num_failed: int) -> None:
        """Say why, to those that wait too, and try again after a pause."""
        if num_failed == 1:
            _log.warning("tool python: an interpreter cannot be started: %s", failure)
        with self._changed:
            self._failure = None if self._ready else failure
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed.is_set(), min(2.0 ** min(num_failed, 6), _LONGEST_PAUSE_S))


def shown(ending: Ending, config: PythonTool) -> str:
    """An ending as text for a model: its output, and how it ended where that was not by itself.

    A long one loses its middle and not its end, where the error stands.
    """
    output = plain(ending.output.decode("utf-8", "replace").replace("\r\n", "\n")).rstrip()
    text = "\n".join(part for part in (output, _remark(ending, config)) if part) or "[no output]"
    most = config.max_output_chars
    if len(text) <= most:
        return text
    mark = f"\n[cut: {len(text):,} characters]\n"
    end = max(0, most - len(mark)) // 2
    return f"{text[: most - len(mark) - end]}{mark}{text[len(text) - end :]}"[:most]


def plain(text: str) -> str:
    """Text without a character that moves a cursor, colours, hides or turns other text round: those are spelled out."""
    return _NOT_PLAIN.sub(lambda match: _spelled(match[0]), text)


def _spelled(char: str) -> str:
    # Cc: control characters, ANSI's escape too; Cf: bidi and zero-width ones; Zl, Zp: other line ends; Cs: halves of a pair
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char.encode("unicode_escape").decode("ascii")
    return char


def _remark(ending: Ending, config: PythonTool) -> str:
    if ending.stopped == "time":
        return f"[stopped: it ran longer than {config.wall_s:g} s]"
    if ending.stopped == "output":
        return f"[stopped: it printed more than {_BYTES_A_CHAR * config.max_output_chars:,} bytes]"
    if not ending.has_died:
        return ""
    # a shell and bubblewrap say 128 + the signal's
    number = -ending.status if ending.status < 0 else ending.status - 128
    if number == signal.SIGKILL:
        return f"[killed: it used more than {config.cpu_s} s of CPU time, or memory ran out]"
    with suppress(ValueError):
        return f"[the interpreter was killed: {signal.Signals(number).name}]"
    return ""
