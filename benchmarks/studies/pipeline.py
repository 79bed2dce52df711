"""Simulate step time, idle engines, latency and staleness of the agentic pipeline and of segments on H100s.

    python benchmarks/studies/pipeline.py [--simulate] [--sensitivities | --full] [--scale 1] [--json FILE] [--picture FILE]

The project's player runs with simulated engines on a virtual clock (simulation/): the trajectory and the agentic pipeline, with 1
and 4 segments, 64 engines and 512 problems. The constants are printed first; one parameter is fitted.

    --sensitivities   also 2 and 8 segments, rollout.overlap, and other numbers of engines and of problems: four times the work
    --full            the sensitivities, and also 4,096 problems: twice the work of --sensitivities
    --scale N         1/N of the engines and problems: less time, and more noise
    --picture         idle engines by segments, as PNG; needs matplotlib (pip install matplotlib)

`ratio:` is the time per trained sample of the trajectory pipeline with 1 segment, divided by that of the agentic one with 4.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from simulation import study, tables


def draw_idle(result: study.Study, grid: study.Grid, path: Path) -> None:
    """Draw the share of the engines' time without work, one line per pipeline."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6.4, 3.4), layout="constrained")).subplots()
    for pipeline in study.PIPELINES:
        idle = [100 * result.rows[study.central(grid, pipeline, n)].idle_share for n in grid.segments]
        axes.plot([str(n) for n in grid.segments], idle, marker="o", label=pipeline)
    axes.set(title="Engines without work, % of the time", xlabel="segments", ylabel="%", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=200)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="no effect, since this command always simulates")
    more = parser.add_mutually_exclusive_group()
    more.add_argument("--sensitivities", action="store_true", help="also vary segments, overlap, engines and problems")
    more.add_argument("--full", action="store_true", help="the sensitivities, also with 4,096 problems")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of engines and problems by this")
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--picture", type=Path, help="write a plot of idle engines by segments to this file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="number of processes")
    options = parser.parse_args()
    grid = study.FULL if options.full else study.SENSITIVITIES if options.sensitivities else study.Grid()
    grid = study.scaled_grid(grid, options.scale)
    print(tables.constants_text(), flush=True)
    study_results = study.begin_study()
    print(tables.fit_text(study_results.fitted), flush=True)
    study.add_rows(
        study_results, grid, lambda line: print(f"  .. {line}", file=sys.stderr, flush=True), options.workers
    )
    print(tables.pipelines_text(study_results, grid))
    if grid.overlap_at is not None:
        print(tables.overlap_text(study_results, grid.overlap_at))
        print(tables.axes_text(study_results, grid))
    print(tables.adds_text(study_results, grid))
    print(f"{sum(study_results.cpu_s.values()):.0f} s of CPU")
    if options.json:
        Path(options.json).write_text(json.dumps(tables.record(study_results), indent=1) + "\n")
    if options.picture:
        draw_idle(study_results, grid, options.picture)
    print(f"ratio: {study_results.ratio(grid.engines, grid.problems):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
