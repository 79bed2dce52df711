"""Benchmark case: one op at one shape, the variants to compare, and the exact results.

    for shape in CASE.shapes("cpu", quick=False):
        bench = CASE.build(shape)          # inputs, ours and the peers
        exact = bench.judge().exact        # float64
        for variant in bench.variants: variant.run()

A case is a module of benchmarks/cases/ with CASE; benchmarks/cases/__init__.py lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.testing import assert_accurate

Outputs = Tensor | tuple[Tensor, ...]
Results = dict[str, Tensor]  # results of a variant by name; the exact results have the same names


def normal(shape: Shape) -> Callable[..., Tensor]:
    """Return a function that draws standard normal float32 tensors on the shape's device, the same in every process."""
    generator = torch.Generator(shape.device).manual_seed(0)
    return lambda *sizes: torch.randn(*sizes, generator=generator, device=shape.device)


@dataclass(frozen=True)
class Shape:
    """Input sizes of a case, for one table of results; sizes that a case does not use are 0.

    tokens, hidden, vocab, sequences: T, H, V (of this rank) and S. mask_share: share of the rows that are trained (in the mask).
    active_share: share of the rows with a nonzero coefficient. note: remark in the title; some cases
    also choose by it what to measure.
    """

    device: str
    dtype: str = "float32"
    tokens: int = 0
    hidden: int = 0
    vocab: int = 0
    sequences: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    experts: int = 0
    mask_share: float = 1.0
    active_share: float = 1.0
    note: str = ""

    def title(self) -> str:
        letters = {
            "tokens": "T", "hidden": "H", "vocab": "V", "sequences": "S", "heads": "N", "kv_heads": "N_kv",
            "head_size": "D", "experts": "E",
        }  # fmt: skip
        sizes = [f"{letter}={getattr(self, name):,}" for name, letter in letters.items() if getattr(self, name)]
        shares = [f"mask share {self.mask_share:g}, active share {self.active_share:g}"] if self.mask_share < 1 else []
        return ", ".join([*sizes, self.dtype, *shares, *([self.note] if self.note else [])])


@dataclass(frozen=True)
class Variant:
    """Implementation to compare. run: does one forward and backward with cleared gradients, and returns the results to check.

    does: remark in the table, such as what the implementation leaves out. prepare: called before each run, without being timed.
    Calling the variant calls `prepare` and `run`.
    """

    name: str
    run: Callable[[], Any]
    does: str = ""
    prepare: Callable[[], Any] = lambda: None

    def __call__(self) -> Results:
        self.prepare()
        results: Results = self.run()
        return results


@dataclass(frozen=True)
class Compared:
    """Inputs and results of a case whose variants are functions of the tensors `inputs`. outputs: names of the results.

    gradient: gradient of the first output. With it, the backward also runs, and the results include the gradients of the inputs.
    """

    inputs: Mapping[str, Tensor]
    gradient: Tensor | None = None
    outputs: tuple[str, ...] = ("out",)

    def variant(self, name: str, function: Callable[..., Outputs], does: str = "") -> Variant:
        return Variant(name, partial(self._run, function, self.inputs), does, self._clear)

    def judge(self, definition: Callable[..., Outputs]) -> Judgement:
        """Compute the reference definition in float64 and in the inputs' own dtypes."""
        exact, plain = (
            {name: values.detach().to(dtype, copy=True).requires_grad_() for name, values in self.inputs.items()}
            for dtype in (torch.float64, None)
        )
        return Judgement(self._run(definition, exact), self._run(definition, plain))

    def _run(self, function: Callable[..., Outputs], inputs: Mapping[str, Tensor]) -> Results:
        returned = function(*inputs.values())
        outputs = returned if isinstance(returned, tuple) else (returned,)
        results = {name: output.detach() for name, output in zip(self.outputs, outputs, strict=True)}
        if self.gradient is None:
            return results
        outputs[0].backward(self.gradient.to(outputs[0].dtype))
        gradients = {name: values.grad for name, values in inputs.items() if values.grad is not None}
        assert gradients.keys() == inputs.keys(), "the backward pass has left no gradient"
        return results | gradients

    def _clear(self) -> None:
        for values in self.inputs.values():
            values.grad = None


@dataclass(frozen=True)
class Missing:
    """Variant that cannot run on this machine, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Judgement:
    """References for a variant's results: the exact results, and those of plain PyTorch.

    scales, apart: arguments of assert_accurate, by name of the result; missing names get 0 and None.
    """

    exact: Results
    plain: Results
    scales: dict[str, float] = field(default_factory=dict)
    apart: Results = field(default_factory=dict)

    def check(self, name: str, what: str, result: Tensor) -> None:
        """Call assert_accurate on the result `what`, with `name` in its message."""
        scale, apart = self.scales.get(what, 0.0), self.apart.get(what)
        assert_accurate(f"{name}, {what}", result, self.exact[what], self.plain[what], scale, apart=apart)


@dataclass(frozen=True)
class Bench:
    """One case at one shape. candidates: all variants, including those that cannot run on this machine.

    judge: computes the Judgement by which variants are checked. It is called once, and never in a child process that measures
    memory.
    flops, bytes: minimum work by formula, with each input read once and each result written once.
    result_bytes: size of the results that every variant must allocate (dX and dW), which peak memory excludes.
    notes: remarks printed with the table.
    """

    candidates: Sequence[Variant | Missing]
    judge: Callable[[], Judgement]
    flops: float
    bytes: float
    result_bytes: int
    notes: list[str] = field(default_factory=list)

    @property
    def variants(self) -> list[Variant]:
        return [candidate for candidate in self.candidates if isinstance(candidate, Variant)]


@dataclass(frozen=True)
class Case:
    """Case with its name on the command line. shapes(device, quick): shapes to measure; with quick, tiny ones as a smoke test."""

    name: str
    shapes: Callable[[str, bool], list[Shape]]
    build: Callable[[Shape], Bench]
