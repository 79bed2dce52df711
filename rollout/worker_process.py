"""Worker processes for work that may hang, crash or exhaust memory: judging answers, parsing untrusted pages.

    reply = pool.ask({"answer": "1/2"}, timeout_s=10)             # starts a worker if none is idle; plain values only

A worker runs this module as a program: it imports a function, calls it with arguments, and answers requests with the result.

    python -P -m marsrl.rollout.worker_process CONNECTION MEMORY_BYTES module:function '{"name": "argument"}'

A worker past its deadline is killed with all processes that it started, and the next caller gets a new one.
multiprocessing, and pools built on it, do not work here: their workers import the trainer's main script, and processes that a
worker started outlive it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from marsrl.rollout.text import without_surrogates

START_TIMEOUT_S = 120.0  # time to load sympy or lxml on a busy machine

Answer = Callable[[dict[str, Any]], Mapping[str, object]]
"""A worker's function: request -> reply. An exception becomes the reply {"error": its type and text}."""


class NotStarted(Exception):
    """Raised if a worker does not start. The message is a predicate, such as "ended with status 1 before it was ready"."""


class Failed(Exception):
    """Raised for a request without a reply. The message is a predicate, such as "found no free process"."""


class Late(Failed):
    """Raised if the worker was killed at its deadline."""

    def __init__(self) -> None:
        super().__init__("took too long")


class Crashed(Failed):
    """Raised if the worker ended during a request. status: its exit code, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"crashed (status {status})")
        self.status = status


class _WorkerProcess:
    """One worker process; called by one thread at a time."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self._line, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P keeps the working directory off the path: its folder names would shadow installed packages.
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # libraries' prints go to stderr
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # kill() ends its children too
            )
        self._ending = threading.Lock()  # prevents a signal to a reused pid

    def wait_until_ready(self) -> None:
        """Wait for the worker; raises NotStarted."""
        try:
            self._reply(START_TIMEOUT_S)
        except Late:
            raise NotStarted(f"was not ready after {START_TIMEOUT_S:.0f} s; is the machine overloaded?") from None
        except Crashed as error:
            raise NotStarted(f"ended with status {error.status} before it was ready") from None

    def ask(self, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Return the worker's reply. Raises Late or Crashed, after which the worker has ended."""
        with contextlib.suppress(OSError):  # a dead worker is noticed below
            self._line.send_bytes(msgspec.msgpack.encode((timeout_s, request)))
        return dict(msgspec.msgpack.decode(self._reply(timeout_s)))

    def _reply(self, timeout_s: float) -> bytes:
        try:
            if self._line.poll(timeout_s):
                return self._line.recv_bytes()
        except (EOFError, OSError):
            status = self.kill()
            raise (Late() if status == -signal.SIGALRM else Crashed(status)) from None
        self.kill()
        raise Late()

    def kill(self) -> int:
        """Kill the worker and its children, wait, and return its exit code. Thread-safe; may be called repeatedly."""
        with self._ending:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # the worker has ended and left no children
                    os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


class WorkerPool:
    """At most `number` worker processes, started on demand and replaced when lost.

    Args:
        load: "module:function", importable by a fresh interpreter. The worker calls it with `arguments` (plain values); it
            returns the function that answers requests.
        memory_bytes: limit of a worker's address space, so that an input like 9**9**9 cannot exhaust the machine's memory.
        environment: the workers' environment variables; None: this process's.
    """

    def __init__(
        self,
        number: int,
        load: str,
        arguments: Mapping[str, object],
        memory_bytes: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = ((str(memory_bytes), load, json.dumps(arguments)), environment)
        self._idle: queue.LifoQueue[_WorkerProcess | None] = queue.LifoQueue()  # None: a worker that is not started yet
        for _ in range(number):
            self._idle.put(None)
        self._all: set[_WorkerProcess] = set()
        self._lock = threading.Lock()  # prevents starts after `close`
        self.is_closed = False

    def ask(self, request: Mapping[str, object], *, timeout_s: float, wait_s: float | None = None) -> dict[str, Any]:
        """Return a worker's reply.

        Raises:
            NotStarted: the worker does not start, or the pool is closed.
            Failed: all workers were busy for wait_s seconds (None: wait forever), or the worker crashed or exceeded timeout_s.
                timeout_s includes the wait if wait_s is set.
        """
        began = time.monotonic()
        try:
            worker = self._idle.get(timeout=wait_s)
        except queue.Empty:
            raise Failed("found no free process") from None
        try:
            if worker is None:
                worker = self._start()
                worker.wait_until_ready()
            waited_s = 0.0 if wait_s is None else time.monotonic() - began
            return worker.ask(request, max(0.001, timeout_s - waited_s))
        except BaseException:
            if worker is not None:
                worker.kill()
                self._all.discard(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all workers, including busy ones, and start no more; may be called twice."""
        with self._lock:
            self.is_closed = True
        for worker in list(self._all):
            worker.kill()

    def _start(self) -> _WorkerProcess:
        with self._lock:
            if self.is_closed:
                raise NotStarted("is not started: its pool is closed")
            worker = _WorkerProcess(*self._command)
            self._all.add(worker)
        return worker


def main(line: str, memory_bytes: str, load: str, arguments: str) -> None:
    """Answer requests in the worker until the parent closes the connection or dies, even during a request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    os.set_inheritable(int(line), False)
    connection = Connection(int(line))
    module, _, function = load.partition(":")
    answer: Answer = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv_bytes())
        os._exit(0)  # the parent is gone; the answering function may hang with signals blocked

    threading.Thread(target=read, daemon=True).start()
    connection.send_bytes(b"ready")
    while True:
        timeout_s, request = msgspec.msgpack.decode(requests.get())
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # the signal ends the process even if C code holds the GIL
        try:
            reply = {name: without_surrogates(value) for name, value in answer(request).items()}
        except Exception as error:  # the parent counts failures of any kind
            reply = {"error": without_surrogates(f"{type(error).__name__}: {error}"[:300])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main(*sys.argv[1:])
