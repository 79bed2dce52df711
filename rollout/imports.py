"""Libraries that a process imports when it starts and keeps until it ends, without looking them through for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 10_000  # objects


@contextmanager
def imports_for_good() -> Iterator[None]:
    """In the body, early in a process, large libraries are imported.

    torch with megatron-core makes half a million objects, vLLM twice as many. Python's collector passes over all of them
    several times while they come, and again whenever somebody asks for a full collection, as megatron-core does with every
    checkpoint. Here it is off meanwhile, and what is there at the end is never passed over again (gc.freeze); garbage among it
    stays, so nothing that is to be given back belongs in the body. From then on it looks at young objects once there are
    10,000 of them, not 700: a process that plays makes thousands a second, which live as long as their samples.
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
