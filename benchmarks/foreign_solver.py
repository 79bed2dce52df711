"""Do a trained Verifier and Corrector help a Solver that they have never met? MarsRL (arXiv:2511.11373), Table 3.

    python benchmarks/foreign_solver.py RUN RUN ... [--json FILE]

RUN: whole trainings of one preset, on a seed each. Of every run three teams are evaluated on the same problems:

own team    its trained policy plays all agents
untrained   another run's policy, before its training, as the Solver; Verifier and Corrector this run's, before its training
trained     the same Solver, with Verifier and Corrector after their training

`alone` is the accuracy of the Solver's first answer in the same episodes, `system` the team's: what they add is the difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from namespace import map_marsrl

ARMS = ("own team", "untrained", "trained")


def settings(run: Path, solver: Path, critics: Path) -> list[str]:
    """Words of `marsrl evaluate`: the run's own, with this Solver and these for all other agents; nothing is trained."""
    words = [f"policies.main.model={critics}", "policies.main.frozen=true"]
    if solver != critics:
        words += [f"policies.foreign.model={solver}", "policies.foreign.frozen=true", "policies.foreign.dtype=float32"]
        words += ["agents.solver.policy=foreign"]
    return ["--config", str(run / "config.yaml"), *words]


def evaluate(words: list[str], out: Path) -> dict[str, float]:
    """What the team reached, as {row of its evaluation: accuracy} and `alone`."""
    from marsrl.trainer.report.summary import Evaluation

    command = [sys.executable, "-m", "marsrl.trainer.cli", "evaluate", *words, "--json", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    evaluation = Evaluation.model_validate(json.loads(out.read_text("utf-8")))
    assert evaluation.alone is not None and evaluation.alone.mean is not None
    found = {name: row.mean for name, row in evaluation.rows.items() if row.mean is not None}
    return {**found, "alone": evaluation.alone.mean, "added": found["system"] - evaluation.alone.mean}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument(
        "--json", type=Path, help="write every number to this file; teams that it has are not evaluated again"
    )
    words = parser.parse_args()
    if len(words.runs) < 2:
        parser.error("a foreign Solver is another run's: name at least two runs")
    map_marsrl()
    from marsrl.benchmarks.record import read_records, surroundings, write_records
    from marsrl.trainer.config.read import read_config
    from marsrl.trainer.report.console import RunConsole
    from marsrl.trainer.schools.warm_start import warm_starts

    configs = [read_config(run / "config.yaml")[0] for run in words.runs]
    before = [warm_starts(config, RunConsole(0))["main"].model_dir for config in configs]
    records = read_records(words.json)
    done = [(record["arm"], record["seed"]) for record in records]
    with tempfile.TemporaryDirectory() as temporary:
        for index, (run, config) in enumerate(zip(words.runs, configs, strict=True)):
            trained = Path(temporary, f"trained{index}")
            export = [sys.executable, "-m", "marsrl.trainer.cli", "export", str(run), str(trained)]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
            solver = before[(index + 1) % len(before)]
            teams = ((trained, trained), (solver, before[index]), (solver, trained))
            for arm, (of_solver, of_critics) in zip(ARMS, teams, strict=True):
                if (arm, config.run.seed) in done:
                    continue
                found = evaluate(settings(run, of_solver, of_critics), Path(temporary, f"{index}-{arm}.json"))
                records.append({"arm": arm, "seed": config.run.seed, "found": found})
                records[-1] |= {"surroundings": dataclasses.asdict(surroundings("cpu"))}
                print(
                    f"{arm}, seed {config.run.seed}: alone {found['alone']:.3f}, team {found['system']:.3f}", flush=True
                )
                write_records(words.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
