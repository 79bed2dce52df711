"""The part of QuACK 0.6.5 that the head calls, by its contract, in PyTorch on the CPU: the head's own epilogues run on tensors.

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

COLUMNS = 64  # of a scale of a transformed operand
# Keywords of Epilogue.gemm; those that say how it is computed are ignored here.
WORDS = ("epi_args", "add_to_output", "transform_a", "tile_M", "tile_N", "tile_K", "cluster_M", "cluster_N", "pingpong")


class Op:
    def __init__(self, name: str, **words: Any) -> None:
        self.name = name
        vars(self).update(words)


class MaxLog2(Op):
    def out(self, name: str) -> Op:
        return Op(name, is_maximum=True)


class Epilogue:
    """D = fn(A @ B.T), and what it declares beside it, per tile of tile_N columns."""

    def __init__(self, fn: Any, **declared: Any) -> None:
        self.fn, self.declared = fn, declared

    def gemm(self, A, B, D, *, epi_args, tile_M, tile_N, add_to_output=False, transform_a=None, **how):
        assert set(how) <= set(WORDS), how
        if transform_a is not None:
            A = A.values(transform_a)
        acc = A.float() @ B.float().t()
        assert D.shape == acc.shape
        given = dict(epi_args)
        if "prepass" in self.declared:
            assert given.pop("max_log2") == tile_N and acc.shape[1] % tile_N == 0
            scaled = self.declared["prepass"](acc, **self.operands(self.declared["prepass"], given))["max_log2"]
            maxima = (scaled.unflatten(1, (-1, tile_N)).amax(2) * (1 / math.log(2))).round()
            given["max_log2_out"].copy_(maxima)
            found = self.fn(acc, maxima.repeat_interleave(tile_N, 1), **self.operands(self.fn, given))
        else:
            found = self.fn(acc, **self.operands(self.fn, given))
        if add_to_output:
            D.add_(found["D"])
        else:
            D.copy_(found["D"])
        for name in self.declared.get("reduces", {}):
            values = found[name] if isinstance(found[name], torch.Tensor) else math.prod(found[name])
            given[name].copy_(values.unflatten(1, (-1, tile_N)).sum(2))
        for name, op in self.declared.get("outs", {}).items():
            index = given[op.idx_op.name]
            rows = ((index >= 0) & (index < acc.shape[1])).nonzero()[:, 0]
            given[name][rows] = found[name][rows, index[rows]]

    @staticmethod
    def operands(fn: Any, given: dict[str, Any]) -> dict[str, Any]:
        """A column vector comes as [1, rows]."""
        names = [name for name in inspect.signature(fn).parameters if name not in ("acc", "max_log2")]
        return {name: given[name][0][:, None] for name in names}


class Transformed:
    """An operand [m, k] whose values are scaled on their way: by u [k / 64, m], or of a transposed one by u [m / 64, k]."""

    def __init__(
        self, transform: Any, operand: torch.Tensor, arguments: dict[str, Any], tile_m: int, tile_k: int
    ) -> None:
        self.transform, self.operand, self.u = transform, operand, arguments["u"]
        assert operand.shape[0] % tile_m == 0 and operand.shape[1] % tile_k == 0
        assert self.u.is_contiguous() and self.u.dtype == operand.dtype == torch.bfloat16

    def values(self, transform: Any) -> torch.Tensor:
        assert transform is self.transform
        u = self.u.t() if transform.kind == "colvec_ktile" else self.u
        scales = u.repeat_interleave(COLUMNS, 1 if transform.kind == "colvec_ktile" else 0)
        assert scales.shape == self.operand.shape
        return transform.fn(self.operand, scales)


def gemm_epilogue(**declared: Any) -> Any:
    return lambda fn: Epilogue(fn, **declared)


def a_transform(*, vec_size: int, args: dict[str, str]) -> Any:
    return lambda fn: Op("transform", fn=fn, kind=args["u"])


NAMES: dict[str, dict[str, Any]] = {
    "quack": {},
    "quack.epilogue": {},
    "quack.epilogue.frontend": {"gemm_epilogue": gemm_epilogue},
    "quack.epilogue.library": {"identity_epi": Epilogue(lambda acc: {"D": acc})},
    "quack.epilogue.math": {"pexp2": torch.exp2},
    "quack.epilogue.ops": dict.fromkeys(("ColVecLoad", "ColVecReduce", "ColVecSelect"), Op),
    "quack.epilogue.scaled_exp": {"MaxLog2": MaxLog2},
    "quack.operand_transform": {"a_transform": a_transform},
    "quack.operand_transform.host": {"transform_a_operand": Transformed},
}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it importable as quack."""
    for name, values in NAMES.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
