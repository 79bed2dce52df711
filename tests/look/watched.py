"""A page in a browser whose every word and request is noted."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import Browser, Page


class Watched:
    """A page, everything that its console said, and every address that it asked. origin: what `open` puts before a query."""

    def __init__(self, browser: Browser, origin: str = "") -> None:
        self.origin = origin
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 900})
        self.page.set_default_timeout(300_000)  # ms; a page takes its time on a busy machine
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, query: str) -> None:
        """Go there, and wait until all that is on its way is shown."""
        self.page.goto(f"{self.origin}{query}")
        self.page.wait_for_selector("main")
        self.page.wait_for_load_state("networkidle")
        self.wait_until("!document.querySelector('main').innerText.includes('Loading')")

    def is_refused_what_is_elsewhere(self) -> bool:
        """Asks for an address of another host: the page's policy forbids it, and `complaints` show that they are complete."""
        self.page.evaluate("fetch('http://example.invalid/').catch(() => 0)")
        self._wait(lambda: any("Content Security Policy" in each for each in self.complaints), "refused")
        return True

    def wait_until(self, is_so: str) -> None:
        """Playwright's own wait_for_function evaluates text in the page, which the pages forbid."""
        self._wait(lambda: self.page.evaluate(is_so), is_so)

    def _wait(self, is_so: Callable[[], bool], words: str) -> None:
        end = time.monotonic() + 300.0
        while not is_so():
            assert time.monotonic() < end, f"never so: {words}"
            self.page.wait_for_timeout(30)
