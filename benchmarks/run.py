"""Compare every kernel with its alternatives: time, share of the roofline, peak memory, error.

    python benchmarks/run.py [case ...] [--all] [--device cpu|cuda] [--json FILE] [--base REV] [--quick] [--profile]

linear_policy_loss is measured first, at the shape of the project's headline number, which the line `ratio:` prints. On a CPU it
is measured only at that shape, unless --all or --shape is given.

Each table is one case at one shape. Our variant is first compared with float64; if it is wrong, no number is printed and the exit
code is 1. Then all variants take turns; the table has median and spread of the rounds. On the CPU variants have one thread, time
is process time, and peak memory is measured in a separate process per variant. On a GPU time is measured by CUDA events with L2
flushed before every call, memory by torch's allocator; the GPU starts a call only when it is completely launched.

    x ours      time of the variant / ours
    roofline    max(FLOPs / GEMM rate, bytes / copy rate) / time; both rates are measured in this run
    host ms     time until Python has launched a call on a GPU; if it exceeds the kernels' time, it limits a training step
    extra MiB   peak memory beyond the inputs and beyond dX and dW
    error       largest error / largest exact value; `!` = more than assert_accurate allows our own kernels
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # torch reads both variables at import
    # Without this, large variants fragment the memory.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import base_revision
import memory
import roofline
import torch
from case import Bench, Case, Judgement, Missing, Results, Shape, Variant
from cases import ORDER, load
from namespace import ROOT
from record import surroundings
from timing import Clock, host_seconds, interleave, top_kernels

HEADLINE = ("linear_policy_loss", "float32", 151_936, 0.5)  # case, dtype, V, mask share of the `ratio:` line
OURS = "ours"
HEADLINE_PEER = "torch eager, unmasked rows only"


@dataclass(frozen=True)
class Row:
    """Line of a table. errors: largest error of each result / its largest exact value. is_right: all errors are within tolerance.

    floor_share: roofline time / median time. extra_bytes: peak memory beyond the inputs, dX and dW; None if unknown.
    host_s: seconds until a call on a GPU is launched.
    """

    name: str
    does: str
    seconds: tuple[float, ...]
    median_s: float
    spread: float
    over_ours: float
    floor_share: float
    extra_bytes: int | None
    host_s: float | None
    errors: dict[str, float]
    is_right: bool


@dataclass(frozen=True)
class Table:
    """Results of a case at one shape. skipped: {variant: reason}. failure: why nothing was measured.

    kernels: with --profile, (milliseconds per call of ours, launches per call, kernel name); first for all kernels together, then
    by decreasing time.
    """

    case: str
    shape: Shape
    flops: float
    bytes: float
    gemm_flops: float
    copy_bytes: float
    rows: tuple[Row, ...] = ()
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    failure: str | None = None
    kernels: tuple[tuple[float, float, str], ...] = ()

    def median(self, name: str) -> float | None:
        return next((row.median_s for row in self.rows if row.name == name), None)


def measure(
    case: Case, shape: Shape, rounds: int, budget_s: float, has_memory: bool, only: str | None, without: list[str]
) -> Table:
    """Check the results of all variants, ours first, then measure time and memory.

    only, without: names of variants (--only, --skip).
    """
    torch.compiler.reset()  # torch compiles a function for at most eight shapes; without a reset it would run this one uncompiled
    roof = roofline.measure(shape.device, shape.dtype)
    bench = case.build(shape)
    table = Table(
        case.name, shape, bench.flops, bench.bytes, roof.gemm_flops, roof.copy_bytes, notes=tuple(bench.notes)
    )
    skipped = {
        candidate.name: candidate.reason.replace(f"{ROOT}/", "")
        for candidate in bench.candidates
        if isinstance(candidate, Missing)
    }
    judgement = bench.judge()
    errors: dict[str, dict[str, float]] = {}
    wrong: dict[str, str] = {}
    usable: list[Variant] = []
    for variant in sorted(bench.variants, key=lambda candidate: candidate.name != OURS):
        if only is not None and variant.name != only:
            continue
        if variant.name in without:
            skipped[variant.name] = "left out by --skip"
            continue
        try:
            results = variant()
        except Exception as error:  # a failing peer is listed with the reason; ours must not fail
            if variant.name == OURS:
                raise
            skipped[variant.name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
            continue
        errors[variant.name], complaint = _errors(variant.name, results, judgement)
        del results
        if complaint is not None:
            wrong[variant.name] = complaint
            if variant.name == OURS:
                return dataclasses.replace(table, skipped=skipped, failure=complaint)
        usable.append(variant)
    del judgement
    _free(shape.device)
    times, failed = interleave(usable, Clock(shape.device), rounds, budget_s)
    skipped |= failed
    extras = _memory(case, shape, bench, usable) if has_memory else {}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows = []
    for variant in usable:
        if (name := variant.name) not in times:
            continue
        seconds, median = times[name], medians[name]
        rows.append(
            Row(
                name=name,
                does=variant.does,
                seconds=seconds,
                median_s=median,
                spread=(max(seconds) - min(seconds)) / median,
                over_ours=median / medians[OURS],
                floor_share=roof.floor_s(bench.flops, bench.bytes) / median,
                extra_bytes=extras.get(name),
                host_s=host_seconds(variant) if shape.device == "cuda" else None,
                errors=errors[name],
                is_right=name not in wrong,
            )
        )
    return dataclasses.replace(table, rows=tuple(sorted(rows, key=lambda row: row.median_s)), skipped=skipped)


def _errors(name: str, results: Results, judgement: Judgement) -> tuple[dict[str, float], str | None]:
    """Return ({result: largest error / largest exact value}, messages of assert_accurate for wrong results)."""
    errors, complaint = {}, None
    for result_name, value in results.items():
        exact = judgement.exact[result_name]
        largest = max(exact.abs().max().item(), judgement.scales.get(result_name, 0.0), 1e-300)
        errors[result_name] = (value.double() - exact).abs().max().item() / largest
        try:
            judgement.check(name, result_name, value)
        except AssertionError as error:
            complaint = complaint or str(error)
    return errors, complaint


def _memory(case: Case, shape: Shape, bench: Bench, variants: list[Variant]) -> dict[str, int]:
    """Return {variant: peak bytes beyond inputs, dX and dW}, without variants that failed in the process that measures memory."""
    if shape.device == "cpu":
        peaks = memory.of_variants_on_cpu(case.name, shape, [variant.name for variant in variants])
    else:
        peaks = {}
        for variant in variants:
            _free("cuda")
            variant.prepare()
            peaks[variant.name] = memory.of_call_on_gpu(variant.run)
    return {name: max(0, num_bytes - bench.result_bytes) for name, num_bytes in peaks.items()}


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def text(table: Table) -> str:
    """Return the table as text for a terminal."""
    lines = [f"{table.case}: {table.shape.title()}"]
    lines.append(
        f"  {table.flops / 1e9:,.1f} GFLOP, {table.bytes / 1e6:,.1f} MB; measured here: GEMM "
        f"{table.gemm_flops / 1e9:,.0f} GFLOP/s, copy {table.copy_bytes / 1e9:,.1f} GB/s"
    )
    lines += [f"  {note}" for note in table.notes]
    if table.failure is not None:
        return "\n".join([*lines, f"  WRONG, so nothing is measured: {table.failure}"])
    names = list(dict.fromkeys(name for row in table.rows for name in row.errors))
    width = max(len(row.name) for row in table.rows) + 2
    lines.append(
        f"  {'':{width}}{'ms':>11}{'spread':>8}{'x ours':>8}{'roofline':>10}{'extra MiB':>11}{'host ms':>9}"
        + "".join(f"{'error ' + name:>17}" for name in names)
    )
    for row in table.rows:
        extra = "-" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:,.0f}"
        host = "-" if row.host_s is None else f"{row.host_s * 1e3:,.2f}"
        cells = [f"{row.errors[name]:.1e}" if name in row.errors else "-" for name in names]
        mark = "" if row.is_right else " !"
        does = f"  {row.does}" if row.does else ""
        lines.append(
            f"  {row.name:{width}}{row.median_s * 1e3:>11,.3f}{row.spread:>8.0%}{row.over_ours:>8.2f}"
            f"{row.floor_share:>10.0%}{extra:>11}{host:>9}" + "".join(f"{cell:>17}" for cell in cells) + mark + does
        )
    lines += [f"  {name}: skipped: {reason}" for name, reason in table.skipped.items()]
    lines += [f"  {ms:10.3f} ms {launches:7.1f}x  {name[:100]}" for ms, launches, name in table.kernels]
    return "\n".join(lines)


def headline(tables: list[Table]) -> float | None:
    """Return the time of torch eager on the unmasked rows divided by ours, at the headline's shape; None if not measured."""
    for table in tables:
        shape = table.shape
        if (table.case, shape.dtype, shape.vocab, shape.mask_share) == HEADLINE and table.rows:
            peer_s, ours_s = table.median(HEADLINE_PEER), table.median(OURS)
            return None if peer_s is None or ours_s is None else peer_s / ours_s
    return None


def chosen(case: Case, shapes: list[Shape], texts: list[str], has_all: bool) -> list[Shape]:
    """Return the shapes to measure, the headline's first. texts: values of --shape, all of which must occur in a shape's title.

    If the case has the headline's shape, only that shape is measured, unless has_all is set or texts are given.
    """
    leading = [shape for shape in shapes if (case.name, shape.dtype, shape.vocab, shape.mask_share) == HEADLINE]
    if leading and not has_all and not texts:
        return leading
    ordered = leading + [shape for shape in shapes if shape not in leading]
    return [shape for shape in ordered if all(text in shape.title() for text in texts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"default: all; {', '.join(ORDER)}")
    parser.add_argument("--all", action="store_true", help="measure every shape, also of the headline's case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    parser.add_argument(
        "--base", metavar="REV", help="also time our variant of this git revision, in turns with the current one"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to check that every case runs")
    parser.add_argument("--rounds", type=int, help="number of timed turns of every variant (default: 7; --quick: 2)")
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        help="time limit per table, seconds; at least 3 rounds run even if they take longer",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    parser.add_argument(
        "--profile", action="store_true", help="also list the kernels in which our variant spends its time"
    )
    parser.add_argument("--only", help="measure only this variant, for example `ours`")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="VARIANT", help="leave out this variant; repeatable"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="TEXT",
        help="measure only shapes whose titles contain this text; repeatable",
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device here")
    try:
        cases = [load(name) for name in options.cases or ORDER]
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    rounds = options.rounds or (2 if options.quick else 7)
    where = surroundings(options.device)
    print("{device} ({instructions}); {clocks}; commit {commit}; load {load}".format(**where))
    print("; ".join(f"{library} {version}" for library, version in where["versions"].items()), flush=True)
    tables = []
    for case in cases:
        every = case.shapes(options.device, options.quick)
        shapes = chosen(case, every, options.shape, options.all)
        if not shapes:
            print(f"{case.name}: nothing to measure on {options.device}")
        for shape in shapes:
            table = measure(case, shape, rounds, options.budget, not options.no_memory, options.only, options.skip)
            if options.profile and table.failure is None:
                ours = next(variant for variant in case.build(shape).variants if variant.name == OURS)
                table = dataclasses.replace(table, kernels=top_kernels(ours, is_cuda=shape.device == "cuda"))
            _free(options.device)
            print(f"\n{text(table)}", flush=True)
            tables.append(table)
            if options.json:  # written after every table, so that an interrupted run keeps its results
                record = {"surroundings": where, "tables": [dataclasses.asdict(t) for t in tables]}
                options.json.write_text(json.dumps(record, indent=1) + "\n")
            if shape is not shapes[-1] and (early := headline([table])) is not None:
                print(f"\nratio: {early:.3f}  (again at the end)", flush=True)
        if shapes and len(shapes) < len(every) and not options.shape:
            print(f"\n{case.name}: {len(every) - len(shapes)} more shapes with --all", flush=True)
    if options.base:
        base_revision.compare(options.base, [case.name for case in cases], options.device, options.quick)
    ratio = headline(tables)
    if ratio is not None:
        print(f"\nratio: {ratio:.3f}")
    return 1 if any(table.failure for table in tables) else 0


if __name__ == "__main__":
    sys.exit(main())
