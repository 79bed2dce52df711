"""What agentic pipelining and segments add: simulated on H100s, or played for real on this machine.

    python benchmarks/pipeline.py --simulate [--json FILE] [--plots DIR] [--scale 1] [--no-sensitivity]
    python benchmarks/pipeline.py [--json FILE] [--problems 32] [--model DIR] [key.sub=value ...]

--simulate: the project's player with simulated engines on a virtual clock (rollout/simulation/): step time, idle engines, time
from a sample's first token to its training, staleness, for trajectory and agentic with 1, 2, 4 and 8 segments, and one
axis at a time around 64 engines x 512 problems. The constants are printed first; one parameter is fitted.

Without it: the same problems are played to their end with a small model on this machine's engine, so that every row
trains the same number of problems; problems enter rollout.prompts_per_step a stage. Training is left out: a sample costs
the same to train in every row.

`ratio:` is the time per trained sample, trajectory with 1 segment over agentic with 4.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from namespace import map_marsrl


def simulate(words: argparse.Namespace) -> float:
    map_marsrl()
    from marsrl.benchmarks.pipeline_study import plots, study, tables

    grid = study.scaled_grid(study.Grid(), words.scale)
    print(tables.constants_text(), flush=True)
    found = study.begin_study()
    print(tables.fit_text(found.fitted), flush=True)
    if not words.no_sensitivity:
        study.add_sensitivity(found, words.workers)
        print(tables.sensitivity_text(found), flush=True)
    study.add_rows(found, grid, lambda line: print(f"  .. {line}", file=sys.stderr, flush=True), words.workers)
    print(tables.pipelines_text(found, grid))
    print(tables.overlap_text(found, grid))
    print(tables.axes_text(found, grid))
    print(tables.adds_text(found, grid))
    print(f"{sum(found.cpu_s.values()):.0f} s of CPU")
    if words.json:
        Path(words.json).write_text(json.dumps(plots.record(found), indent=1) + "\n")
    if words.plots:
        for path in plots.write_plots(found, grid, Path(words.plots)):
            print(path)
    return found.ratio(grid.engines, grid.problems)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("--plots", help="with --simulate: write the pictures and their data to this folder")
    parser.add_argument("--scale", type=int, default=1, help="with --simulate: engines and problems by this much fewer")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="with --simulate: processes")
    parser.add_argument("--no-sensitivity", action="store_true", help="with --simulate: leave the 34 refits out")
    parser.add_argument("--problems", type=int, default=32, help="problems that every row plays to the end")
    parser.add_argument("--model", help="model directory (default: the warm start of the configuration)")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")
    words = parser.parse_intermixed_args()
    if words.simulate:
        ratio = simulate(words)
    else:
        from played_pipeline import played  # marsrl as it is installed: Ray actors import it too

        ratio = played(words.problems, words.model, words.settings, words.json)
    print(f"ratio: {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
