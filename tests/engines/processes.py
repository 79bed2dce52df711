"""Processes that a test has started, directly or not."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Its children (default: of this process), theirs and so on."""
    return (process or psutil.Process()).children(recursive=True)


def actors() -> list[psutil.Process]:
    """Processes of engines that Ray has started for this process, oldest first."""
    found = []
    for process in descendants():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.name().startswith("ray::Engine"):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())
