"""Bytes of other processes that this one holds at once: what connections bring, and what a relay takes from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from marsrl.rollout.weights.connections import GroupConnection, SharedBuffer

_PEAK = [0]
after_each_bucket: list[Callable[[], None]] = []  # called when one has come


def peak() -> int:
    """The most since it was last asked for."""
    found, _PEAK[0] = _PEAK[0], 0
    return found


@contextmanager
def counted() -> Iterator[None]:
    """They are counted within it."""
    held = [0]

    def receive(self: Any, rank: int, num_elements: int, *, plain: Any) -> torch.Tensor:
        flat: torch.Tensor = plain(self, rank, num_elements)
        held[0] += flat.nbytes
        _PEAK[0] = max(_PEAK[0], held[0])
        for listener in after_each_bucket:
            listener()
        return flat

    def release(self: Any, *, plain: Any) -> None:
        held[0] = 0
        plain(self)

    def recv(tensor: torch.Tensor, *args: Any, plain: Any = dist.recv, **kwargs: Any) -> Any:
        _PEAK[0] = max(_PEAK[0], tensor.nbytes)
        return plain(tensor, *args, **kwargs)

    def all_gather(
        parts: list[torch.Tensor], own: torch.Tensor, *args: Any, plain: Any = dist.all_gather, **more: Any
    ) -> Any:
        _PEAK[0] = max(_PEAK[0], sum(part.nbytes for part in parts) - own.nbytes)
        return plain(parts, own, *args, **more)

    with ExitStack() as changes:
        for kind in (GroupConnection, SharedBuffer):
            taken, freed = kind.receive, kind.release
            changed = {
                "receive": lambda self, rank, n, plain=taken: receive(self, rank, n, plain=plain),
                "release": lambda self, plain=freed: release(self, plain=plain),
            }
            changes.enter_context(patch.multiple(kind, **changed))
        changes.enter_context(patch.multiple(dist, recv=recv, all_gather=all_gather))
        yield
