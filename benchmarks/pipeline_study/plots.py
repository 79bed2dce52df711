"""The study's pictures (PNG) and the numbers behind them (JSON)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from marsrl.rollout.simulation.play import Outcome

from .calibrate import PUBLISHED_S, READINGS
from .charts import write_line_chart
from .study import PIPELINES, Grid, Study, central, name, ours, reference


def record(study: Study) -> dict[str, Any]:
    """Everything as plain values, for --json."""
    return {
        "constants": asdict(study.constants),
        "fit": {**asdict(study.fitted), "published_s": PUBLISHED_S},
        "sensitivity": {
            constant: {str(factor): asdict(f) for factor, f in fits.items()}
            for constant, fits in study.sensitivity.items()
        },
        "rows": [{"setting": asdict(s), "name": name(s), "outcome": asdict(o)} for s, o in study.rows.items()],
        "cpu_s": study.cpu_s,
    }


def write_plots(study: Study, grid: Grid, folder: Path) -> list[Path]:
    """One file a picture, and pipeline_simulation.json with their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    by_segments = [str(n) for n in grid.segments]
    charts = {
        "ulorl": (
            "UloRL: seconds a step, published and simulated", "segments (1 is fitted, 2 and 4 are predicted)", "s",
            [str(n) for n in PUBLISHED_S],
            {
                "published": list(PUBLISHED_S.values()),
                **{label: [getattr(study.fitted, field)[n] for n in PUBLISHED_S] for field, label in READINGS.items()},
            },
        ),
        "step_time": (
            "Seconds per trained sample", "segments", "s", by_segments, _lines(study, grid, lambda o: o.s_per_sample)
        ),
        "idle": (
            "Engines without work, % of the time", "segments", "%", by_segments,
            _lines(study, grid, lambda o: 100 * o.idle_share),
        ),
        "latency": (
            "First token to trained, mean", "segments", "s", by_segments, _lines(study, grid, lambda o: o.latency_mean_s)
        ),
        "staleness": (
            "Staleness of trained samples, agentic", "versions", "% of samples", ["0", "1", "2", "3", "4", "5+"],
            {f"{n} segments": _staleness(study, grid, n) for n in grid.segments},
        ),
        "engines": (
            f"Seconds per trained sample x engines / {grid.engines}; {grid.problems} problems a step", "engines", "s",
            [str(n) for n in grid.engine_axis],
            {
                label: [
                    study.rows[setting(n, grid.problems)].s_per_sample * n / grid.engines for n in grid.engine_axis
                ]
                for label, setting in _COMPARED
            },
        ),
        "problems": (
            f"Seconds per trained sample; {grid.engines} engines", "new problems a step", "s",
            [str(n) for n in grid.problem_axis],
            {
                label: [study.rows[setting(grid.engines, n)].s_per_sample for n in grid.problem_axis]
                for label, setting in _COMPARED
            },
        ),
    }  # fmt: skip
    paths = []
    for title, chart in charts.items():
        paths.append(folder / f"pipeline_simulation_{title}.png")
        write_line_chart(paths[-1], *chart)
    paths.append(folder / "pipeline_simulation.json")
    paths[-1].write_text(json.dumps(record(study), indent=1) + "\n")
    return paths


_COMPARED = (("trajectory, 1 segment", reference), ("agentic, 4 segments", ours))


def _lines(study: Study, grid: Grid, value: Callable[[Outcome], float]) -> dict[str, list[float | None]]:
    return {pipeline: [value(study.rows[central(grid, pipeline, n)]) for n in grid.segments] for pipeline in PIPELINES}


def _staleness(study: Study, grid: Grid, segments: int) -> list[float | None]:
    shares = study.rows[central(grid, "agentic", segments)].staleness
    return [*(100 * shares.get(v, 0.0) for v in range(5)), 100 * sum(s for v, s in shares.items() if v >= 5)]
