"""The part of QuACK 0.6.5 that the head calls, in PyTorch, for CPUs. It runs the head's own epilogues.

tests/install/test_locks.py compares the names with QuACK's wheel.
"""

import inspect
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

# Keyword arguments of Epilogue.gemm. Here, arguments that only tune the GEMM on a GPU have no effect.
WORDS = ("epi_args", "tile_M", "tile_N", "cluster_M", "cluster_N", "pingpong")


class Op:
    def __init__(self, name: str, **words: Any) -> None:
        self.name = name
        vars(self).update(words)


class Epilogue:
    """D = fn(A @ B.T) and its declared extra outputs, per tile of tile_N columns."""

    def __init__(self, fn: Any, **declared: Any) -> None:
        self.fn, self.declared = fn, declared

    def gemm(self, A, B, D, *, epi_args, tile_M, tile_N, **how):
        assert set(how) <= set(WORDS), how
        acc = A.float() @ B.float().t()
        assert D.shape == acc.shape and A.shape[0] % tile_M == 0
        given = dict(epi_args)
        outputs = self.fn(acc, **self.operands(self.fn, given))
        D.copy_(outputs["D"])
        for name in self.declared["reduces"]:
            values = outputs[name] if isinstance(outputs[name], torch.Tensor) else math.prod(outputs[name])
            given[name].copy_(values.unflatten(1, (-1, tile_N)).sum(2))
        for name, op in self.declared["outs"].items():
            index = given[op.idx_op.name]
            rows = ((index >= 0) & (index < acc.shape[1])).nonzero()[:, 0]
            given[name][rows] = outputs[name][rows, index[rows]]

    @staticmethod
    def operands(fn: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the epilogue's operands: column vectors [rows, 1], which callers of gemm pass as [1, rows]."""
        names = [name for name in inspect.signature(fn).parameters if name != "acc"]
        return {name: given[name][0][:, None] for name in names}


def gemm_epilogue(**declared: Any) -> Any:
    return lambda fn: Epilogue(fn, **declared)


NAMES: dict[str, dict[str, Any]] = {
    "quack": {},
    "quack.epilogue": {},
    "quack.epilogue.frontend": {"gemm_epilogue": gemm_epilogue},
    "quack.epilogue.math": {"pexp2": torch.exp2},
    "quack.epilogue.ops": dict.fromkeys(("ColVecLoad", "ColVecReduce", "ColVecSelect"), Op),
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable as quack."""
    for name, values in NAMES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
