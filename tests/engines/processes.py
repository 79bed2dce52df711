"""Processes that a test has started, directly or not."""

from __future__ import annotations

import psutil


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Its children (default: of this process), theirs and so on."""
    return (process or psutil.Process()).children(recursive=True)


def actors() -> list[psutil.Process]:
    """Processes of engines that Ray has started for this process, oldest first."""
    found = [process for process in descendants() if process.name().startswith("ray::Engine")]
    return sorted(found, key=lambda process: process.create_time())
