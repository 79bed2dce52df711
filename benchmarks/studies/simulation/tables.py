"""Tables and text that show the simulation study: constants, the fit, predictions, pipelines, and varied settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from simulation.calibrate import MISS, PUBLISHED_S, READINGS, ULORL, Fit
from simulation.cost_model import MEASURED_ITL, Constants, constants_table
from simulation.lengths import MEDIAN_TOKENS
from simulation.play import Outcome
from simulation.study import Grid, Study, central, name, ours, overlapped, reference


def constants_text() -> str:
    """Return the constants that were set before the fit."""
    measured = ", ".join(f"{b}: {1e3 * itl:.1f}" for b, itl in MEASURED_ITL)
    rows = [*constants_table(Constants())]
    rows.append(
        ("decode step", measured, "ms", "sequences: time; ML.ENERGY leaderboard, this model on two H100s, GPQA")
    )
    rows.append(
        ("median length", str(MEDIAN_TOKENS), "tokens", "792 completions of this model on GPQA, ML.ENERGY leaderboard")
    )
    rows.append(("prompts a step", str(ULORL.problems), "", "MarsRL, by the same authors; groups of 8"))
    rows.append(("engines (UloRL)", str(ULORL.engines), "", "ASSUMED: 32 H100s; the paper's number is not known to us"))
    return "Constants, before any fitting\n" + columns(("constant", "value", "unit", "source"), rows)


def fit_text(fitted: Fit) -> str:
    """Return the fitted sigma, and a table of UloRL's published step times and the predictions of both READINGS."""
    rows = []
    for segments, published in PUBLISHED_S.items():
        cells = [str(segments), f"{published:.0f}"]
        for reading in READINGS:
            error = fitted.error(reading, segments)
            verdict = "fitted" if segments == 1 else "within 15%" if abs(error) <= MISS else "MISS"
            cells += [f"{getattr(fitted, reading)[segments]:.0f}", f"{100 * error:+.0f}% {verdict}"]
        rows.append((*cells, f"{fitted.samples[segments]:.0f}"))
    head = f"UloRL: sigma of the log-normal lengths fitted to 1 segment: {fitted.sigma:.3f}"
    names = [cell for label in READINGS.values() for cell in (f"{label}: s", "off by")]
    return head + "\n" + columns(("segments", "published s", *names, "samples trained per step"), rows)


def pipelines_text(study: Study, grid: Grid) -> str:
    """Return a table that compares the pipelines at the centre of the grid."""
    rows = []
    for setting, outcome in study.rows.items():
        if setting == central(grid, setting.pipeline, setting.segments):  # leaves out the settings of overlap_text
            rows.append((setting.pipeline, str(setting.segments), *_cells(outcome)))
    head = f"{grid.engines} engines, {grid.problems} new problems a step, groups of {grid.group_size}, five agents, 64k"
    return f"{head}\n" + columns(("pipeline", "segments", *_HEADS), rows)


def overlap_text(study: Study, size: tuple[int, int]) -> str:
    """Return a table that compares overlap 0 and 1 for the agentic pipeline with 4 segments. size: (engines, problems)."""
    rows = [(str(overlap), *_cells(study.rows[overlapped(size, overlap)])) for overlap in (0, 1)]
    head = (
        f"rollout.overlap, agentic with 4 segments, {size[0]} engines, {size[1]} problems "
        "(with 1 the trainer has GPUs of its own: twice as many in all)"
    )
    return f"{head}\n" + columns(("overlap", *_HEADS), rows)


def axes_text(study: Study, grid: Grid) -> str:
    """Return a table per axis that compares the reference with ours."""
    rows = []
    places = [(e, grid.problems) for e in grid.engine_axis] + [(grid.engines, p) for p in grid.problem_axis]
    for point in dict.fromkeys(places):
        slow, fast = study.rows[reference(*point)], study.rows[ours(*point)]
        cells = [f"{o.s_per_sample:.3f}" for o in (slow, fast)] + [f"{100 * o.idle_share:.0f}%" for o in (slow, fast)]
        rows.append((str(point[0]), str(point[1]), *cells, f"{study.ratio(*point):.2f}"))
    heads = ("engines", "problems", "trajectory x1: s/sample", "agentic x4: s/sample", "idle x1", "idle x4", "ratio")
    return "One axis at a time\n" + columns(heads, rows)


def adds_text(study: Study, grid: Grid) -> str:
    """Return the gains of the agentic pipeline alone, of segments alone and of both, at the centre of the grid."""
    slow, fast = reference(grid.engines, grid.problems), ours(grid.engines, grid.problems)
    time_of = {setting: study.rows[setting].s_per_sample for setting in study.rows}
    pipeline_alone = time_of[slow] / time_of[replace(slow, pipeline="agentic")]
    segments_alone = time_of[slow] / time_of[replace(fast, pipeline="trajectory")]
    return (
        f"Agentic pipelining alone (1 segment): {pipeline_alone:.2f}x; 4 segments alone (trajectory): {segments_alone:.2f}x; "
        f"both: {time_of[slow] / time_of[fast]:.2f}x"
    )


_HEADS = (
    "step s", "rollout s", "train s", "idle", "samples/step", "s/sample", "GPU s/sample", "first token to trained: mean s",
    "p90 s", "staleness mean", "0", "1", "2", "3", "4+",
)  # fmt: skip


def _cells(o: Outcome) -> tuple[str, ...]:
    shares = [o.staleness.get(v, 0.0) for v in range(4)]
    shares.append(max(0.0, 1 - sum(shares)))
    return (
        f"{o.step_s:.0f}", f"{o.rollout_s:.0f}", f"{o.train_s:.0f}", f"{100 * o.idle_share:.0f}%", f"{o.samples_per_step:.0f}",
        f"{o.s_per_sample:.3f}", f"{o.gpu_s_per_sample:.1f}", f"{o.latency_mean_s:.0f}", f"{o.latency_p90_s:.0f}",
        f"{o.staleness_mean:.2f}", *(f"{100 * share:.0f}%" for share in shares),
    )  # fmt: skip


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns by the widest cell, the first to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            cell.ljust(width) if i == 0 or not _is_number(rows, i) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(not row[column] or row[column][0] in "0123456789+-n" for row in rows)


def record(study: Study) -> dict[str, Any]:
    """Return everything as plain values, for --json."""
    return {
        "constants": asdict(study.constants),
        "fit": {**asdict(study.fitted), "published_s": PUBLISHED_S},
        "rows": [{"setting": asdict(s), "name": name(s), "outcome": asdict(o)} for s, o in study.rows.items()],
        "cpu_s": study.cpu_s,
    }
