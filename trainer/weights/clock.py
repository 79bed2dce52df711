"""Where the seconds of a publish went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class Clock:
    """Seconds by part. A part that begins inside of another interrupts it."""

    def __init__(self) -> None:
        self.seconds_of: dict[str, float] = {}
        self._start = time.perf_counter()
        self._inside: list[float] = [0.0]  # of each open part, the seconds that went to parts inside of it

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds_of[part] = self.seconds_of.get(part, 0.0) + elapsed - self._inside.pop()
            self._inside[-1] += elapsed

    def move(self, part: str, to: str, seconds: float) -> None:
        """Book a share of one part under another."""
        seconds = min(seconds, self.seconds_of[part])
        self.seconds_of[part] -= seconds
        self.seconds_of[to] = self.seconds_of.get(to, 0.0) + seconds

    def timed(self, part: str, items: Iterator[_T]) -> Iterator[_T]:
        """The items; the time until each of them is there counts for `part`."""
        while True:
            with self.of(part):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
