"""Which Python the tests start runs and engines with. `make test` has servers that fork them: see server.py."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

PYTHON = str(Path(os.environ["MARSRL_FORKS"]) / "python") if "MARSRL_FORKS" in os.environ else sys.executable


class _Sys(ModuleType):
    """sys, but for the executable."""

    def __init__(self, executable: str) -> None:
        super().__init__("sys")
        self.executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def let_ray_fork(python: str = PYTHON) -> None:
    """The workers of a Ray that this process starts are forked, where there are servers."""
    from ray._private import services

    services.sys = _Sys(python)  # it starts a worker with sys.executable, and takes no other


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Its children (default: of this process), theirs and so on; those that were forked for one of them too."""
    found = []
    for child in (process or psutil.Process()).children(recursive=True):
        found.append(child)
        with contextlib.suppress(psutil.NoSuchProcess):
            kind, _, pid = child.name().partition(" ")
            if kind == "forked":
                forked = psutil.Process(int(pid))
                found += [forked, *descendants(forked)]
    return found


def actors() -> list[psutil.Process]:
    """Processes of engines that Ray has started for this process, oldest first."""
    found = [process for process in descendants() if process.name().startswith("ray::Engine")]
    return sorted(found, key=lambda process: process.create_time())
