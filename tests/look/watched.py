"""A page in a browser that records every console message and request."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import Browser, Page


class Watched:
    """A page, everything on its console, and every address it requested. origin: address to which `open` appends a query."""

    def __init__(self, browser: Browser, origin: str = "") -> None:
        self.origin = origin
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(300_000)  # ms; a page is slow on a busy machine
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, query: str) -> None:
        """Open the address with this query, and wait until everything is shown."""
        self.page.goto(f"{self.origin}{query}")
        self.page.wait_for_selector("main")
        self.page.wait_for_load_state("networkidle")
        self.wait_until("!document.querySelector('main').innerText.includes('Loading')")

    def is_refused_what_is_elsewhere(self) -> bool:
        """Request an address of another host, and return True if the page's policy refuses it and `complaints` shows that."""
        self.page.evaluate("fetch('http://example.invalid/').catch(() => 0)")
        self._wait(lambda: any("Content Security Policy" in each for each in self.complaints), "refused")
        return True

    def wait_until(self, is_so: str) -> None:
        """Wait for a condition. Playwright's own wait_for_function evaluates text in the page, which the pages' policy
        forbids.
        """
        self._wait(lambda: self.page.evaluate(is_so), is_so)

    def _wait(self, is_so: Callable[[], bool], words: str) -> None:
        end = time.monotonic() + 300.0
        while not is_so():
            assert time.monotonic() < end, f"timed out waiting for: {words}"
            self.page.wait_for_timeout(30)
