"""Processes that a test has started, directly or not."""

from __future__ import annotations

import contextlib

import psutil


def descendants(process: psutil.Process | None = None, name: str = "") -> list[psutil.Process]:
    """Its children (default: of this process), theirs and so on, whose name begins so; oldest first."""
    found = []
    for child in (process or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if child.name().startswith(name):
                found.append((child.create_time(), child))
    return [child for _, child in sorted(found, key=lambda each: each[0])]


def actors() -> list[psutil.Process]:
    """Processes of engines that Ray has started for this process, oldest first."""
    return descendants(name="ray::Engine")
