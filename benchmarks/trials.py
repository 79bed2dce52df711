"""Every op at tiny shapes, in every dtype, by every implementation that this machine has: what smoke.py checks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from case import Bench, Judgement, Shape
from cases import load

from marsrl.kernels.dispatch import ENVIRONMENT, explain

DTYPES = ("bfloat16", "float32", "float16")
DTYPES_OF = {
    "linear_policy_loss": DTYPES, "linear_logprob": DTYPES, "head_gemms": DTYPES, "attention_varlen": DTYPES,
    "attention_decode": DTYPES, "grouped_linear": DTYPES[:2], "swiglu": DTYPES, "rms_norm": DTYPES,
}  # fmt: skip
HEADS = ("linear_policy_loss", "linear_logprob")
OPS = {"mpt_gate": ("sequence_sums",), "packing": (), "policy_rows": (), "head_gemms": ()}
"""The ops that a case calls, where they are not named as it is; none: its variants that begin with `ours` are tried."""


@dataclass(frozen=True)
class Trial:
    """One case at one shape. forced: MARSRL_KERNELS; empty: all variants of the case that are ours."""

    case: str
    shape: Shape
    forced: str = ""

    @property
    def name(self) -> str:
        return f"{self.case}, {self.shape.title()}, {self.forced.rpartition('=')[2] or 'all of ours'}"


def trials(cases: Sequence[str], device: str) -> Iterator[Trial]:
    """Trials of these cases in their first dtype, then in the next: the time that is left may not suffice for all."""
    implementations = {each.op: {*([each.chosen] if each.chosen else []), *each.reasons} for each in explain()}
    for turn in range(len(DTYPES)):
        for case in cases:
            ops = OPS.get(case, (case,))
            for dtype in DTYPES_OF.get(case, ("float32",))[turn : turn + 1]:
                for shape in (replace(shape, dtype=dtype) for shape in _shapes(case, device)):
                    if not ops:
                        yield Trial(case, shape)
                        continue
                    for name in sorted(set.intersection(*(implementations[op] for op in ops))):
                        yield Trial(case, shape, ",".join(f"{op}={name}" for op in ops))


def _shapes(case: str, device: str) -> list[Shape]:
    quick = load(case).shapes(device, True)
    if case not in HEADS:
        return quick
    shares = (0.5, 0.25) if case == "linear_policy_loss" else (1.0, 1.0)
    first = replace(quick[-1], mask_share=shares[0], active_share=shares[1])
    return [first, replace(first, tokens=132, hidden=40, vocab=1021, note="sizes that no tile divides")]


@lru_cache(maxsize=1)
def _bench(case: str, shape: Shape) -> tuple[Bench, Judgement]:
    bench = load(case).build(shape)
    return bench, bench.judge()


def attempt(trial: Trial) -> str | None:
    """Run it and judge all results (AssertionError); why it cannot run here, or None."""
    bench, judgement = _bench(trial.case, trial.shape)
    if trial.forced:
        os.environ[ENVIRONMENT] = trial.forced
    try:
        for variant in bench.variants:
            if variant.name == "ours" or (not trial.forced and variant.name.startswith("ours, ")):
                for what, found in variant().items():
                    judgement.check(variant.name, what, found)
    except RuntimeError as error:
        if str(error).startswith(f"{ENVIRONMENT}="):  # asked for by name, and it says why it cannot serve
            return str(error).rpartition(": ")[2]
        raise
    finally:
        os.environ.pop(ENVIRONMENT, None)
    return None
