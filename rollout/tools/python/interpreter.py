"""One interpreter of the sandbox, seen from the host: started, given one snippet, stopped, killed.

All that it starts is in one process group, which it cannot leave (seccomp.py), so that one signal ends it and one call slows it
down. What it writes is bytes that are bounded and never interpreted.
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

from marsrl.rollout.tools.python.cgroup import Cgroup

_READY = b"ready\n"
_SLOW_AFTER_S = 0.25
_SLOW_NICE = 15  # of what runs longer than that: short snippets, and the trainer, go before it
_CHUNK = 1 << 16


class StartError(Exception):
    """An interpreter did not come up; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a snippet.

    stopped: the bound that it passed, "time" or "output"; None where it ended by itself. has_died: its process ended before it
    was through. status: the exit code, of the process where that has died.
    """

    output: bytes
    stopped: str | None
    status: int
    has_died: bool


class Interpreter:
    """A process that waits for one snippet. The thread that starts it must outlive it: the kernel ends it with that thread."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cgroup: Cgroup | None = None) -> None:
        """cgroup: what it goes into, and what ends with it. Raises OSError where the command cannot be started."""
        self._cgroup = cgroup
        self._line, theirs = socket.socketpair()  # its input: the snippet goes there, and its exit code comes back
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*(cgroup.entering if cgroup is not None else ()), *command],
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
            if cgroup is not None:
                cgroup.end()
            raise
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._signalling = threading.Lock()  # no signal to a number that was given back

    @property
    def is_alive(self) -> bool:
        with self._signalling:
            return self._process.poll() is None

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises StartError where it ends, or is not ready in time."""
        deadline, said = time.monotonic() + timeout_s, b""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        while not said.endswith(_READY):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise StartError(f"not ready after {timeout_s:g} s")
            chunk = os.read(self._output.fileno(), _CHUNK)
            said += chunk
            if not chunk or len(said) > _CHUNK:
                words = " ".join(said.decode("utf-8", "replace").split())
                raise StartError(words[-200:] or "it ended without a word")

    def run(self, code: str, wall_s: float, most_bytes: int) -> Ending:
        """Give it its snippet, and end it. It is still to be killed: that waits for its end, which takes longer than many a
        snippet.
        """
        output, stopped, status = bytearray(), None, None
        slow_at, deadline = time.monotonic() + _SLOW_AFTER_S, time.monotonic() + wall_s
        with contextlib.suppress(OSError):  # it has died; its end says so next
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
                        poll.unregister(out)  # closed: it may go on without a word
                elif status is not None or pidfd in ready:
                    break  # nothing is left to be read
                elif self._line.fileno() in ready:
                    said = self._line.recv(1)
                    status = said[0] if said else None
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
        """Let others go first. A session's share is its autogroup's where the kernel has those, else its processes' own."""
        with contextlib.suppress(OSError):  # it has just ended, or there are none
            os.setpriority(os.PRIO_PGRP, self._process.pid, _SLOW_NICE)
            Path(f"/proc/{self._process.pid}/autogroup").write_text(str(_SLOW_NICE))

    def end(self) -> None:
        """End it at once, with all that it has started. From any thread; it is still to be killed."""
        with self._signalling, contextlib.suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it, wait for it, release its pipes. May be called twice."""
        self.end()
        self._line.close()
        self._output.close()
        self._reap()
        if self._cgroup is not None:
            self._cgroup.end()
            self._cgroup = None

    def _reap(self) -> int:
        with self._signalling:
            return self._process.wait()
