"""Processes that a test has started, directly or not."""

from __future__ import annotations

from contextlib import suppress

import psutil


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Its children (default: of this process), theirs and so on."""
    return (process or psutil.Process()).children(recursive=True)


def actors(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of engines among its descendants, oldest first."""
    found = []
    for each in descendants(process):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if each.name().startswith("ray::Engine"):
                found.append(each)
    return sorted(found, key=lambda each: each.create_time())
