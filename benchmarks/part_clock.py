"""Seconds of a training step by part: forward passes, backward passes, the optimizer, and the rest."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

REST = "rest"
PLACES = {
    "forward": [("trainer.learner.megatron.head", "PolicyModel", "forward")],
    "backward": [("trainer.learner.megatron.passes", "Passes", "forward_backward")],  # minus the forward passes inside
    "optimizer": [
        ("trainer.learner.megatron.optimizer", owner, name)
        for owner in ("Optimizer", "BankOptimizer")
        for name in ("zero_grad", "grad_norms", "apply")
    ],
}
"""{part: (module of marsrl, class, method)}."""


class PartClock:
    """Clock of a step's parts. Time counts for the part whose method in PLACES is running, otherwise for REST.

    On a GPU it records events without waiting, so a part's seconds are time of the stream, including idle gaps. On a CPU it reads
    the process time.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._open: list[str] = [REST]
        self._marks: list[tuple[str, Any]] = []  # (part, start of the part)
        for part, places in PLACES.items():
            for module, owner_name, method in places:
                owner = getattr(import_module(f"marsrl.{module}"), owner_name)
                setattr(owner, method, self._around(part, getattr(owner, method)))

    def start(self) -> None:
        """Forget the previous step, and start a new one."""
        self._marks.clear()
        self._mark()

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since start()."""
        self._mark()
        if self._is_cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (part, begin), (_, end) in pairwise(self._marks):
            seconds[part] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return dict(seconds)

    def _mark(self) -> None:
        now: Any = time.process_time()
        if self._is_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((self._open[-1], now))

    def _around(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **options: Any) -> Any:
            self._open.append(part)
            self._mark()
            try:
                return method(*args, **options)
            finally:
                self._open.pop()
                self._mark()

        return timed
