"""Is every op right here, in every dtype, by every implementation that this machine has? Seconds, before anything is timed.

python benchmarks/smoke.py [case ...] [--device cuda|cpu] [--journal FILE]

The benchmarks' own cases at tiny shapes, judged by the rule of the tests. Prints what is not right (exit code 1 then), or
leaves it in the journal of one_by_one.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from case import Bench, Judgement, Shape
from cases import ORDER, load
from one_by_one import Journal, Skipped, tell

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
    implementations = {each.op: [*([each.chosen] if each.chosen else []), *each.reasons] for each in explain()}
    for turn in range(len(DTYPES)):
        for case in cases:
            ops = OPS.get(case, (case,))
            for dtype in DTYPES_OF.get(case, ("float32",))[turn : turn + 1]:
                for shape in (replace(shape, dtype=dtype) for shape in _shapes(case, device)):
                    if not ops:
                        yield Trial(case, shape)
                        continue
                    for name in sorted(set.intersection(*(set(implementations[op]) for op in ops))):
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


def attempt(trial: Trial) -> None:
    """Runs it and judges all results; AssertionError, or whatever the op raises."""
    bench, judgement = _bench(trial.case, trial.shape)
    if trial.forced:
        os.environ[ENVIRONMENT] = trial.forced
    try:
        for variant in bench.variants:
            if variant.name != "ours" and (trial.forced or not variant.name.startswith("ours, ")):
                continue
            if variant.prepare is not None:
                variant.prepare()
            for what, found in variant.run().items():
                judgement.check(variant.name, what, found)
    except RuntimeError as error:
        if str(error).startswith(f"{ENVIRONMENT}="):  # asked for by name, and it says why it cannot serve
            raise Skipped(str(error).rpartition(": ")[2]) from error
        raise
    finally:
        os.environ.pop(ENVIRONMENT, None)


def is_broken() -> bool:
    """The device answers nothing any more."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"all if none is named: {', '.join(ORDER)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--journal", type=Path, help="file that keeps what was tried; what it holds is not tried again")
    words = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(words.journal or Path(folder) / "journal.jsonl")
        tried = journal.tried()
        for trial in trials(words.cases or ORDER, words.device):
            if trial.name not in tried:
                with journal.trying(trial.name, is_broken):
                    attempt(trial)
                    if words.device == "cuda":
                        torch.cuda.synchronize()
        return 0 if words.journal else tell(journal.checks(), None)


if __name__ == "__main__":
    sys.exit(main())
