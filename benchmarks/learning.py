"""Train the default or another preset on several seeds, and report for all of them whether RL made the agents better.

    python benchmarks/learning.py [key.sub=value ...] [--seeds 0 1 2] [--json FILE]
    python benchmarks/learning.py preset=cpu_solver_verifier [key.sub=value ...]
    python benchmarks/learning.py preset=cpu_search_team [key.sub=value ...]
    python benchmarks/learning.py preset=cpu_dual_system [key.sub=value ...]

Each seed is a whole run through torchrun, like a user's: warm start, evaluation, RL, evaluation. The table has for every seed the
rise of the reward (last quarter of the steps minus the first, in standard errors), and the agents' accuracy before and after RL.
There are two rewards: the Solver's, whose inputs do not change, and the mean over all samples. The mix of samples changes: the
first steps have no Correctors, and in the last steps Correctors get only the remaining errors.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import Evaluation, Summary, load_summary

MAIN = Path(__file__).resolve().parent.parent / "trainer" / "main.py"


REWARDS = {
    "Solver's reward": "reward/solver/mean",
    "Answer agent's reward": "reward/answer/mean",
    "System 2's reward": "reward/system2/mean",
    "reward of all samples": "reward/all/mean",
}


def run(seed: int, folder: str, settings: list[str]) -> tuple[Summary, dict[str, float]]:
    """Run once; return the run's summary, and the rise of each of the team's REWARDS in standard errors."""
    name = f"seed{seed}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(MAIN), f"run.seed={seed}"]
    subprocess.run(
        [*command, f"run.dir={folder}", f"run.name={name}", *settings], check=True, stdout=subprocess.DEVNULL
    )
    directory = Path(folder) / name
    rows = read_metrics(directory / "metrics.jsonl")
    rewards = {
        label: [value for row in rows if (value := row.values.get(name)) is not None] for label, name in REWARDS.items()
    }
    rises = {label: rise(values) for label, values in rewards.items() if values}
    return load_summary(directory / "summary.json"), rises


def rise(rewards: list[float]) -> float:
    """Return (mean of the last quarter of the steps - mean of the first) / standard error; steps are treated as independent.

    rewards: mean reward per step, for steps that have one.
    """
    quarter = max(2, len(rewards) // 4)
    first, last = rewards[:quarter], rewards[-quarter:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    return (statistics.fmean(last) - statistics.fmean(first)) / error if error else 0.0


def findings(before: Evaluation, after: Evaluation, rises: dict[str, float]) -> dict[str, bool]:
    """Return a seed's criteria as {name: True if met}."""

    def gain(name: str) -> float:
        return (after.rows[name].mean or 0.0) - (before.rows[name].mean or 0.0)

    criteria = {f"{label} rises by 2 standard errors": value > 2 for label, value in rises.items()}
    verifier = next((name for name in after.rows if name.startswith("verifier")), None)
    if verifier is not None and "solver" in after.rows:  # otherwise the Solver is the whole team, or there is no Solver
        criteria[f"{verifier} +.05"] = gain(verifier) >= 0.05
        criteria["system above solver"] = (after.system.mean or 0.0) > (after.rows["solver"].mean or 0.0)
    return {**criteria, "system +.10": gain("system") >= 0.10}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", help="write every number to this file")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")
    options = parser.parse_intermixed_args()
    records, gains = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            summary, rises = run(seed, temporary, options.settings)
            before, after = summary.before, summary.after
            assert before is not None and after is not None
            criteria = findings(before, after, rises)
            print(
                f"seed {seed}: standard errors of the rise: "
                + ", ".join(f"{label} {value:.1f}" for label, value in rises.items())
            )
            for name in before.rows:
                a, b = before.rows[name], after.rows[name]
                if a.mean is None or b.mean is None:
                    continue  # not measured before or after RL
                print(
                    f"  {name:10} {a.mean:.3f} ({a.low:.3f}-{a.high:.3f}) -> {b.mean:.3f} ({b.low:.3f}-{b.high:.3f}), n {b.n}"
                )
            print(
                "  " + "; ".join(f"{criterion}: {'yes' if is_met else 'NO'}" for criterion, is_met in criteria.items()),
                flush=True,
            )
            gains.append((after.system.mean or 0.0) / max(before.system.mean or 0.0, 1e-9))
            records.append({"summary": summary.model_dump(mode="json"), "standard_errors": rises, "wanted": criteria})
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1))
    print(f"ratio: {statistics.geometric_mean(gains):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
