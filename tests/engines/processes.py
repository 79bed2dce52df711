"""Processes that a test has started, directly or not."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def started_with(variable: str, value: str) -> list[psutil.Process]:
    """All but this one whose environment has it, as children inherit it, with their name and cmdline in `info`."""
    every = psutil.process_iter(["name", "cmdline", "environ", "status"])
    theirs = [each for each in every if (each.info["environ"] or {}).get(variable) == value]
    return [each for each in theirs if each.info["status"] != psutil.STATUS_ZOMBIE and each.pid != os.getpid()]


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
