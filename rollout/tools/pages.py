"""Web pages as text, for `visit` and for searches with read_pages.

    address -> fetch.Fetcher (a thread of the pool) -> bytes -> a process of main_text.py -> main text

Agents do not call the tool `Pages`; `visit` and the searches call it through the pool, which caches its outputs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict

from marsrl.rollout.tools.config import PagesConfig, VisitTool
from marsrl.rollout.tools.fetch import Fetched, Fetcher, Refused
from marsrl.rollout.tools.protocol import WAITED, ReadPages, ToolError, text_argument, text_arguments
from marsrl.rollout.worker_process import Failed, NotStarted, WorkerPool

PARSERS = "marsrl.rollout.tools.main_text:load_parsers"
_INHERITED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")  # environment of the parsers, without API keys


class Pages:
    """Tool behind visit and read_pages: {"url": address} -> the main text of the page."""

    is_deterministic = True  # a page is fetched once per run

    def __init__(self, limits: PagesConfig) -> None:
        """Create the tool without starting or fetching anything."""
        self._limits = limits
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._fetcher = Fetcher(limits)
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        self._workers = WorkerPool(limits.workers, PARSERS, {}, limits.memory_mib << 20, inherited)

    def run(self, arguments: Mapping[str, object]) -> str:
        url = text_argument(arguments, "url")
        deadline = time.monotonic() + WAITED * self._limits.timeout_s
        try:
            fetched = self._fetcher.fetch(url, deadline)
            self._count("bytes", len(fetched.body))
            text = self._main_text(fetched, deadline)
        except Refused:
            self._count("refused")
            raise
        if not text:
            raise ToolError("the page has no main text")
        self._count("read")
        return text

    def take_counts(self) -> Mapping[str, float]:
        """Return counts of pages.

        read: pages whose text was extracted. refused: pages rejected by our limits, not by a server. bytes: decompressed bytes.
        """
        with self._counting:
            counts = {name: float(self._counts[name]) for name in ("read", "refused", "bytes")}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """End the parsers; pages being parsed fail. May be called twice."""
        self._workers.close()

    def _main_text(self, page: Fetched, deadline: float) -> str:
        """Extract the main text of a page. Raises ToolError if the page has none, or the deadline passes."""
        request = {**asdict(page), "most_chars": self._limits.max_output_chars}
        try:
            left_s = max(0.001, deadline - time.monotonic())
            reply = self._workers.ask(request, timeout_s=left_s, wait_s=left_s)
        except Failed as error:
            raise ToolError(f"parsing the page {error} (tools.pages: workers, timeout_s)") from None
        except NotStarted as error:
            raise RuntimeError(
                f"the process that parses pages {error}; raise tools.pages.memory_mib, or see its output on stderr"
            ) from None
        if "error" in reply:
            raise ToolError(f"the page cannot be parsed ({reply['error']})")
        return str(reply["text"])

    def _count(self, name: str, number: int = 1) -> None:
        with self._counting:
            self._counts[name] += number


class Visit:
    """Tool for pages: {"url": address} or {"urls": [addresses]} -> one part per page."""

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
        """Do nothing: there are no resources to release."""
