"""Pages of the web as text: what `visit` and a search with read_pages show of them.

    address -> fetch.Fetcher (a thread of the pool) -> bytes -> a process of TextWorkers -> main text

Agents do not call it by its name: visit and the searches do, through the pool, which keeps what it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping

from marsrl.rollout.tools.config import PagesConfig, VisitTool
from marsrl.rollout.tools.fetch import Fetched, Fetcher, Refused
from marsrl.rollout.tools.protocol import WAITED, ReadPages, ToolError, text_argument, text_arguments

_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")  # by what parses pages: no keys


class Pages:
    """The tool behind visit and read_pages: {"url": address} -> the main text of the page."""

    name = "pages"
    argument = "url"
    is_deterministic = True  # what was read once in a run is not asked for again

    def __init__(self, limits: PagesConfig) -> None:
        """Nothing is fetched or started yet."""
        self._limits = limits
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._fetcher = Fetcher(limits, lambda number: self._count("bytes", number))
        self._workers = TextWorkers(limits.workers, limits.memory_mib)

    def run(self, arguments: Mapping[str, object]) -> str:
        url = text_argument(arguments, "url")
        deadline = time.monotonic() + WAITED * self._limits.timeout_s
        try:
            fetched = self._fetcher.fetch(url, deadline)
            text = self._workers.text(fetched, self._limits.max_output_chars, deadline)
        except Refused:
            self._count("refused")
            raise
        if not text:
            raise ToolError("the page has no text of its own")
        self._count("read")
        return text

    def take_counts(self) -> Mapping[str, float]:
        """read: pages whose text was made; refused: by our limits, not by a server; bytes: received, of both and of others."""
        with self._counting:
            counts = {name: float(self._counts[name]) for name in ("read", "refused", "bytes")}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Pages that are being parsed fail; may be called twice."""
        self._workers.close()

    def _count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self._counts[name] += number


class Visit:
    """The tool: {"url": address} or {"urls": [addresses]} -> a part a page."""

    name = "visit"
    argument = "url"
    is_deterministic = True

    def __init__(self, options: VisitTool, read: ReadPages) -> None:
        self._wait_s, self._read = WAITED * options.timeout_s, read

    def run(self, arguments: Mapping[str, object]) -> list[str]:
        urls = text_arguments(arguments, "url", "urls")
        pages = self._read(urls, self._wait_s)
        if all(page.is_error for page in pages):
            raise ToolError("; ".join(page.text.removeprefix("error: ") for page in pages))
        return [f"Page {i}({url}) {page.text}" for i, (url, page) in enumerate(zip(urls, pages, strict=True), start=1)]

    def close(self) -> None:
        """Nothing to release."""


class TextWorkers:
    """Processes of main_text.py, started when they are needed. One that crashes, or is ended by its time, is replaced."""

    def __init__(self, number: int, memory_mib: int) -> None:
        self._memory_mib = memory_mib
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()  # None: not started
        for _ in range(number):
            self._idle.put(None)
        self._all: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()  # of _all and _is_closed
        self._is_closed = False

    def text(self, page: Fetched, most_chars: int, deadline: float) -> str:
        """The main text of a page, about most_chars of it at most. deadline: monotonic seconds.

        Raises:
            ToolError: it has none that could be read until then.
        """
        try:
            worker = self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise ToolError("no process was free to parse the page in time (tools.pages.workers)") from None
        try:
            worker = worker or self._started()
            seconds = max(0.001, deadline - time.monotonic())
            request = {"media_type": page.media_type, "charset": page.charset, "num_bytes": len(page.body)}
            reply = _asked(worker, json.dumps(request | {"most_chars": most_chars, "seconds": seconds}), page.body)
            if reply is None:
                self._end(worker)
                status, worker = worker.returncode, None
                late = status == -signal.SIGALRM
                raise ToolError(f"parsing the page {'took too long' if late else f'crashed (status {status})'}")
        except BaseException:
            if worker is not None:
                self._end(worker)
                worker = None
            raise
        finally:
            self._idle.put(worker)
        if "error" in reply:
            raise ToolError(f"the page cannot be parsed ({reply['error']})")
        return str(reply["text"])

    def close(self) -> None:
        """End them all; may be called twice."""
        with self._lock:
            self._is_closed = True
            left = list(self._all)
        for worker in left:
            self._end(worker)

    def _started(self) -> subprocess.Popen[bytes]:
        """A process that is ready; RuntimeError where it does not come up."""
        with self._lock:
            if self._is_closed:
                raise ToolError("the tool is closed")
            worker = subprocess.Popen(
                # -P: the working directory is not on the path; its folder names would shadow installed packages
                [sys.executable, "-P", "-m", "marsrl.rollout.tools.main_text", str(self._memory_mib)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                start_new_session=True,
            )
            self._all.add(worker)
        assert worker.stdout is not None
        if not worker.stdout.readline():
            self._end(worker)
            raise RuntimeError(
                f"the process that parses pages ended with status {worker.returncode} before it was ready: raise "
                "tools.pages.memory_mib, or see its words on stderr"
            )
        return worker

    def _end(self, worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        with self._lock:
            self._all.discard(worker)
        assert worker.stdin is not None and worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it was not sent
            worker.stdin.close()
        worker.wait()
        worker.stdout.close()


def _asked(worker: subprocess.Popen[bytes], request: str, body: bytes) -> dict[str, object] | None:
    """Its reply; None where it has ended."""
    assert worker.stdin is not None and worker.stdout is not None
    try:
        worker.stdin.write(request.encode() + b"\n" + body)
        worker.stdin.flush()
    except (BrokenPipeError, ValueError):  # ValueError: closed by another thread
        return None
    line = worker.stdout.readline()
    return dict(json.loads(line)) if line.endswith(b"\n") else None
