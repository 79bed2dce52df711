"""Host side of one sandboxed interpreter: starts it, gives it one snippet, stops and kills it.

All its processes are in one process group, which they cannot leave (seccomp.py), so that one signal ends them and one call lowers
their priority. Its output is a bounded number of bytes that are never interpreted.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_READY = b"ready\n"
_SLOW_AFTER_S = 0.25
_SLOW_NICE = 15  # niceness of longer runs: short snippets and the trainer have priority
_CHUNK = 1 << 16


class StartError(Exception):
    """Raised if an interpreter does not start; the message is its output."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a snippet.

    stopped: name of the exceeded limit, "time" or "output"; None if the snippet ended by itself. has_died: True if the process
    ended before the snippet did. status: exit code of the snippet, or of the process if it died.
    """

    output: bytes
    stopped: str | None
    status: int
    has_died: bool


class Interpreter:
    """A process that waits for one snippet. The kernel ends it when the thread that started it ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process. Raises OSError if the command cannot be started."""
        # Socket that is the process's stdin. It carries the snippet to the process, and the exit code back.
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    env=dict(environment),
                    cwd="/",
                    start_new_session=True,
                )
        except OSError:
            self._line.close()
            raise
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._signalling = threading.Lock()  # prevents signals to a reused pid

    @property
    def is_alive(self) -> bool:
        with self._signalling:
            return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait for the interpreter. Raises StartError if it ends or is not ready in time."""
        deadline, output = time.monotonic() + timeout_s, b""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        while not output.endswith(_READY):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise StartError(f"it was not ready after {timeout_s:g} s")
            chunk = os.read(self._output.fileno(), _CHUNK)
            output += chunk
            if not chunk or len(output) > _CHUNK:
                message = " ".join(output.decode("utf-8", "replace").split())
                raise StartError(message[-200:] or "it exited without output")

    def run(self, code: str, wall_s: float, most_bytes: int) -> Ending:
        """Run a snippet and end the interpreter.

        The caller must still call `kill`, which waits for the exit; an exit takes longer than many snippets.
        """
        output, stopped, status = bytearray(), None, None
        slow_at, deadline = time.monotonic() + _SLOW_AFTER_S, time.monotonic() + wall_s
        with contextlib.suppress(OSError):  # the process has died; the code below notices
            self._line.settimeout(wall_s)
            self._line.sendall(code.encode("utf-8", "replace"))
            self._line.shutdown(socket.SHUT_WR)
        pidfd = os.pidfd_open(self._process.pid)
        try:
            poll, out = select.poll(), self._output.fileno()
            for file in (pidfd, out, self._line):
                poll.register(file, select.POLLIN)
            while stopped is None:
                now = time.monotonic()
                if now >= slow_at:
                    self._slow_down()
                    slow_at = deadline
                left_s = 0.0 if status is not None else max(0.0, min(slow_at, deadline) - now)
                ready = {fd for fd, _ in poll.poll(left_s * 1000 + (left_s > 0))}
                if out in ready:
                    chunk = os.read(out, _CHUNK)
                    output += chunk
                    if not chunk:
                        poll.unregister(out)  # output is closed, but the snippet may still run
                elif status is not None or pidfd in ready:
                    break  # nothing is left to be read
                elif self._line.fileno() in ready:
                    status_byte = self._line.recv(1)
                    status = status_byte[0] if status_byte else None
                    poll.unregister(self._line)
                if len(output) > most_bytes:
                    stopped = "output"
                elif now >= deadline:
                    stopped = "time"
        finally:
            os.close(pidfd)
            self.end()
        has_died = status is None and stopped is None
        return Ending(bytes(output[:most_bytes]), stopped, self._reap() if has_died else status or 0, has_died)

    def _slow_down(self) -> None:
        """Lower the priority of the session's autogroup, or of its processes if the kernel has no autogroups."""
        with contextlib.suppress(OSError):  # the process has just ended, or the kernel has no autogroups
            os.setpriority(os.PRIO_PGRP, self._process.pid, _SLOW_NICE)
            Path(f"/proc/{self._process.pid}/autogroup").write_text(str(_SLOW_NICE))

    def end(self) -> None:
        """End the process and all its children at once. Thread-safe; `kill` must still be called."""
        with self._signalling, contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process, wait for its exit and release its pipes. May be called twice."""
        self.end()
        self._line.close()
        self._output.close()
        self._reap()

    def _reap(self) -> int:
        with self._signalling:
            return self._process.wait()
