"""Worker processes for work that may hang, crash or take all memory: judges of answers, parsers of a stranger's pages.

    with pool.worker() as worker:                                 # one that is free, started where there is none
        reply = worker.ask({"answer": "1/2"}, timeout_s=10)       # plain values each way, bytes too

A worker past its deadline is killed with all processes that it has started, and the next caller gets another one. Not
multiprocessing or a pool on top of it: their children import the trainer's main script, and what a child has started
outlives it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgpack

START_TIMEOUT_S = 120.0  # loading sympy or lxml on a busy machine

Answer = Callable[[dict[str, Any]], Mapping[str, object]]
"""A worker's function: request -> reply. An exception is the reply {"error": its type and text}."""


class NotStarted(Exception):
    """A worker did not come up; the text says how it failed, "ended with status 1 before it was ready"."""


class Late(Exception):
    """The worker was killed at its deadline."""


class Crashed(Exception):
    """The worker ended in the middle of its work. status: its exit code, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with status {status}")
        self.status = status


class WorkerProcess:
    """One process that runs `serve`; asked by one thread at a time."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None) -> None:
        self._line, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                # -P: the working directory is not on the path; its folder names would shadow installed packages
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints goes to stderr
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # what it starts is ended with it
            )
        self._ending = threading.Lock()  # no signal to a number that was given back

    def wait_until_ready(self) -> None:
        """Raises NotStarted."""
        try:
            self._reply(START_TIMEOUT_S)
        except Late:
            raise NotStarted(f"was not ready after {START_TIMEOUT_S:.0f} s; is the machine overloaded?") from None
        except Crashed as error:
            raise NotStarted(f"{error} before it was ready") from None

    def ask(self, request: Mapping[str, object], *, timeout_s: float) -> dict[str, Any]:
        """Its reply. Raises Late or Crashed; the worker has ended then."""
        with contextlib.suppress(OSError):  # it has died; the end of its replies says so next
            self._line.send_bytes(_packed((timeout_s, request)))
        return dict(_unpacked(self._reply(timeout_s)))

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
        """End it at once with all that it has started, and wait for it; its exit code. From any thread, again and again."""
        with self._ending:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and has left nobody
                    os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()


class WorkerPool:
    """At most `number` worker processes, started when they are needed and replaced where one was lost.

    Args:
        module: what a worker runs (python -m), which calls `serve` with the first of its arguments.
        environment: of the workers; None: this process's.
    """

    def __init__(
        self, number: int, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self._command = (module, arguments, environment)
        self._idle: queue.LifoQueue[WorkerProcess | None] = queue.LifoQueue()  # None: not started
        for _ in range(number):
            self._idle.put(None)
        self._all: set[WorkerProcess] = set()
        self._lock = threading.Lock()  # none is started once it is closed
        self.is_closed = False

    @contextlib.contextmanager
    def worker(self, wait_s: float | None = None) -> Iterator[WorkerProcess]:
        """A worker for the caller alone. One in whose time the caller fails is killed.

        Raises:
            queue.Empty: all were busy for wait_s; None waits without end.
            NotStarted: it does not come up, or the pool is closed.
        """
        worker = self._idle.get(timeout=wait_s)
        try:
            if worker is None:
                worker = self._start()
                worker.wait_until_ready()
            yield worker
        except BaseException:
            if worker is not None:
                worker.kill()
                self._all.discard(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill all workers, busy ones too, and start no more; may be called twice."""
        with self._lock:
            self.is_closed = True
        for worker in list(self._all):
            worker.kill()

    def _start(self) -> WorkerProcess:
        with self._lock:
            if self.is_closed:
                raise NotStarted("is not started: its pool is closed")
            worker = WorkerProcess(*self._command)
            self._all.add(worker)
        return worker


def serve(line: str, memory_bytes: int, load: Callable[[], Answer]) -> None:
    """The worker's side: answers requests until the parent closes the connection or is gone, even in the middle of one.

    Args:
        line: the first argument of the process, which names the connection.
        memory_bytes: of address space: a tower of powers must not take the machine with it.
        load: makes what answers, before the worker is ready.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    os.set_inheritable(int(line), False)
    connection = Connection(int(line))
    answer = load()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv_bytes())
        os._exit(0)  # the parent is gone; an answer may hang with its signals blocked

    threading.Thread(target=read, daemon=True).start()
    connection.send_bytes(b"ready")
    while True:
        timeout_s, request = _unpacked(requests.get())
        signal.setitimer(signal.ITIMER_REAL, timeout_s)  # where C code keeps Python's lock, this ends it
        try:
            reply = dict(answer(request))
        except Exception as error:  # any failure of what answers is the parent's to count
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(_packed(reply))


def _packed(value: object) -> bytes:
    return msgpack.packb(value, unicode_errors="surrogatepass")  # a page can spell half of a surrogate pair


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass")
