"""Imports of large libraries without garbage collection, and packages that may be missing."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 10_000  # objects


@contextmanager
def imports_for_good() -> Iterator[None]:
    """Import large libraries in the body, early in a process.

    torch with megatron-core makes half a million objects, vLLM twice as many. Python's collector traverses all of them several
    times during the import, and again in every full collection, such as megatron-core's at every checkpoint. So collection is
    off in the body, and whatever exists at its end is exempt for good (gc.freeze). Garbage among it is never freed: create
    nothing else in the body. Afterwards young objects are collected every 10,000 allocations instead of 700: a process that
    plays allocates thousands a second, which live as long as their samples.
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


def check_installed(setting: str, *packages: str, extra: str = "", otherwise: str = "") -> None:
    """Raise ValueError if packages that a setting needs are missing. extra: marsrl's, with them; otherwise: what else helps."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ValueError(
            f"{setting} needs {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}"
            f"{f' (marsrl[{extra}])' if extra else ''}{f', or {otherwise}' if otherwise else ''}"
        )
