"""Imports of large libraries, checks for missing packages, and environment variables set for a library's call."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 10_000  # allocated objects between collections of the youngest generation


@contextmanager
def imports_for_good() -> Iterator[None]:
    """Disable garbage collection while the block imports large libraries; use early in a process.

    torch with megatron-core makes half a million objects, vLLM twice as many. Python's collector traverses them several
    times during the import, and again in every full collection, such as megatron-core's at every checkpoint. So collection
    is off in the block, and all objects that exist at its end are exempt permanently (gc.freeze). Garbage among them is
    never freed: create nothing else in the block. Afterwards young objects are collected every 10,000 allocations instead
    of 700: a process that plays episodes allocates thousands of objects a second, and they live as long as their samples.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])
        if was_enabled:
            gc.enable()


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set these environment variables for this process inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_installed(setting: str, *packages: str, extra: str = "", otherwise: str = "") -> None:
    """Raise ValueError if a setting's packages are missing.

    extra: marsrl's extra that installs the packages. otherwise: alternative that the message suggests.
    """
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ValueError(
            f"{setting} needs {' and '.join(missing)}, which this environment lacks; run pip install {' '.join(missing)}"
            f"{f' (marsrl[{extra}])' if extra else ''}{f', or {otherwise}' if otherwise else ''}"
        )
