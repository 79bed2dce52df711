"""The tool `python`: each snippet gets an interpreter that was started ahead and is discarded afterwards.

    keepers -> ready interpreters -> a call takes one, gives it the snippet, stops it -> text
                                                                    |-> the reaper kills it

Calls share nothing, so nothing has to be cleaned up between them: each has its own process tree, /tmp, namespaces and, under
root, user id, which all end with it. An interpreter that forks for each call would start faster, but its children would see one
another unless its own code isolated them. Here bubblewrap isolates them, and its cost, the start of an interpreter, is paid
between the calls.

Dedicated threads, the keepers, start the interpreters. The kernel kills an interpreter when the thread that started it ends
(PR_SET_PDEATHSIG), so a killed trainer leaves none behind. A ToolPool's threads cannot start them, because they may end first.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.protocol import ToolError, text_argument
from marsrl.rollout.tools.python.interpreter import Ending, Interpreter, StartError
from marsrl.rollout.tools.python.launcher import check_sandbox, start_interpreter

_log = logging.getLogger(__name__)

_START_S = 60.0  # limit until an interpreter is ready, on a busy machine
_PAUSE_S = 5.0  # pause after a failed start
_GIVES_WAY_S = 0.5  # maximum delay of a start, in favour of running calls, while other interpreters are ready
_NICE = 5
_BYTES_A_CHAR = 4  # maximum bytes of a character in UTF-8
_NOT_PLAIN = re.compile(r"[^\n\t -~]")


class PythonInterpreter:
    """Tool: {"code": "..."} -> the code's output, with the value of its last expression or the traceback of its error.

    The caller must close it.
    ready: interpreters that wait for a call.
    """

    is_deterministic = False

    def __init__(self, config: PythonTool) -> None:
        """Create the tool. Raises ValueError if this machine has no sandbox."""
        self._config = config
        check_sandbox(config)
        self._changed = threading.Condition()  # guards the fields below
        self.ready: deque[Interpreter] = deque()
        self._running: set[Interpreter] = set()
        self._num_starting = 0
        self._failure: str | None = None  # reason of the last failed start
        self._is_closed = False
        self._reaper = ThreadPoolExecutor(1, "marsrl-python-end")
        num_keepers = min(config.warm, os.cpu_count() or 1)
        self._keepers = [
            threading.Thread(target=self._keep, name="marsrl-python", daemon=True) for _ in range(num_keepers)
        ]
        for keeper in self._keepers:
            keeper.start()

    def run(self, arguments: Mapping[str, object]) -> str:
        """Return the output of a snippet. Raises ToolError for invalid arguments, or if no interpreter is available."""
        code = text_argument(arguments, "code")
        interpreter = self._take()
        try:
            ending = interpreter.run(code, self._config.wall_s, _BYTES_A_CHAR * self._config.max_output_chars)
        finally:
            with self._changed:
                self._running.remove(interpreter)
                self._reaper.submit(interpreter.kill)
                self._changed.notify_all()
        return shown(ending, self._config)

    def close(self) -> None:
        """Kill every interpreter; may be called twice. Running calls end as if their snippet had been killed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            for interpreter in self._running:
                interpreter.end()
            self._changed.wait_for(lambda: not self._running)
        for keeper in self._keepers:
            keeper.join()
        self._reaper.shutdown()
        while self.ready:
            self.ready.pop().kill()

    def _take(self) -> Interpreter:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self.ready or self._failure is not None or self._is_closed)
                if self._is_closed:
                    raise ToolError("python is not available: it was closed")
                if not self.ready:
                    raise ToolError(f"python is not available: {self._failure}")
                interpreter = self.ready.popleft()
                self._changed.notify_all()  # wakes the keepers, to start a replacement
                if interpreter.is_alive:  # otherwise memory ran out, and the kernel has killed the interpreter
                    self._running.add(interpreter)
                    return interpreter
                self._reaper.submit(interpreter.kill)

    def _keep(self) -> None:
        """A keeper's thread: starts interpreters while there is room, until the tool is closed."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # applies to this thread and its children
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or len(self.ready) + self._num_starting < self._config.warm
                )
                self._changed.wait_for(lambda: self._is_closed or not (self._running and self.ready), _GIVES_WAY_S)
                if self._is_closed:
                    return
                self._num_starting += 1
            failure = self._start()
            with self._changed:
                self._num_starting -= 1
                if failure is not None and self._failure is None:
                    _log.warning("tool python: an interpreter cannot be started: %s", failure)
                self._failure = failure
                self._changed.notify_all()
                if failure is not None:
                    self._changed.wait_for(lambda: self._is_closed, _PAUSE_S)

    def _start(self) -> str | None:
        """Add a ready interpreter, or return why it did not start."""
        try:
            interpreter = start_interpreter(self._config)
        except OSError as error:
            return str(error)
        try:
            interpreter.wait_until_ready(_START_S)
        except (StartError, OSError) as error:
            interpreter.kill()
            return str(error)
        self.ready.append(interpreter)
        return None


def shown(ending: Ending, config: PythonTool) -> str:
    """Describe an ending for a model: the output, and how the snippet was ended, unless it ended by itself.

    A long output is cut in the middle, so that an error at its end stays.
    """
    output = _NOT_PLAIN.sub(_spelled, ending.output.decode("utf-8", "replace").replace("\r\n", "\n")).rstrip()
    text = "\n".join(part for part in (output, _remark(ending, config)) if part) or "[no output]"
    most = config.max_output_chars
    if len(text) <= most:
        return text
    mark = f"\n[cut: {len(text):,} characters]\n"
    end = max(0, most - len(mark)) // 2
    return f"{text[: most - len(mark) - end]}{mark}{text[len(text) - end :]}"[:most]


def _spelled(match: re.Match[str]) -> str:
    """Return the character, escaped if it moves the cursor, or colours, hides or reverses other text."""
    # Cc: control characters, including ANSI's escape; Cf: bidi and zero-width characters; Zl, Zp: other line ends.
    if unicodedata.category(match[0]) in ("Cc", "Cf", "Zl", "Zp"):
        return match[0].encode("unicode_escape").decode("ascii")
    return match[0]


def _remark(ending: Ending, config: PythonTool) -> str:
    if ending.stopped == "time":
        return f"[stopped: it ran longer than {config.wall_s:g} s]"
    if ending.stopped == "output":
        return f"[stopped: it printed more than {_BYTES_A_CHAR * config.max_output_chars:,} bytes]"
    if not ending.has_died:
        return ""
    # Shells and bubblewrap return 128 + the signal's number.
    number = -ending.status if ending.status < 0 else ending.status - 128
    if number == signal.SIGKILL:
        return f"[killed: it used more than {config.cpu_s} s of CPU time, or memory ran out]"
    with suppress(ValueError):
        return f"[the interpreter was killed: {signal.Signals(number).name}]"
    return ""
