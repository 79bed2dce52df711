"""Trainings that differ in one choice, on the CPU: what does it change? All seeds are reported, none is chosen.

    python benchmarks/ablations.py marsrl [key.sub=value ...] [--seeds 0 1 2] [--arms whole ...] [--json FILE] [--dir DIR]
    python benchmarks/ablations.py drmas
    python benchmarks/ablations.py mars

marsrl  MarsRL without one of its parts, or with another choice: agents' own rewards or the outcome's, who is trained, which
        answers are judged and repaired, the gate of well-mastered tokens (with the entropy of the first and the last quarter),
        segments, means over tokens or samples; MarsRL, arXiv:2511.11373, and UloRL, arXiv:2507.19766. The miniature is
        configs/cpu_default.yaml
drmas   what a reward is compared with (credit.normalise: agent; trajectory, the published GRPO baseline; global; and mean and
        deviation of one each), by one policy for both agents or one each; Dr. MAS, arXiv:2602.08847, section 5.4. The
        miniature is configs/cpu_solver_verifier.yaml, whose agents' mean rewards differ on purpose
mars    the dual system without one of its parts: System 1, Python, the balance of its samples, a mean of each system; MARS,
        arXiv:2510.04935. The miniature is configs/cpu_dual_system.yaml

Each cell is a whole training of each seed; they share the seed's warm start. The table has, as mean over seeds with Student's 95%
interval of that mean, accuracies after training, rewards of its last quarter, and for drmas the largest gradient norm, the 99th
percentile over the steps (several policies: the norm of all their gradients as one vector) and the spikes of a training (metric
grad_spikes). A training that stops is told, and is in no mean.

`ratio:` is the team's accuracy under `agent` over that under `trajectory` (geometric mean over shared and separate policies),
or of the whole dual system over that without System 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespace import ROOT, map_marsrl


@dataclass(frozen=True)
class Ablation:
    """factors: {name of a choice: {value: its settings}}; every combination is a cell. evaluated: rows of the evaluation.

    agents: whose rewards are told. columns: of the table. ratio: (choice, value, value). counted: metrics whose means over the
    last quarter of the steps are reported.
    """

    preset: str
    factors: Mapping[str, Mapping[str, tuple[str, ...]]]
    evaluated: tuple[str, ...]
    agents: tuple[str, ...]
    columns: tuple[str, ...]
    ratio: tuple[str, str, str]
    counted: tuple[str, ...] = ()

    def only(self, arms: Sequence[str] | None) -> Ablation:
        """With these values of the choice `arm`; None: all.

        Raises:
            ValueError: there is no such choice, or no such value.
        """
        if arms is None:
            return self
        known = self.factors.get("arm", {})
        if unknown := [arm for arm in arms if arm not in known]:
            raise ValueError(f"--arms: there is no {unknown[0]!r}; arms: {', '.join(known) or 'none'}")
        return dataclasses.replace(self, factors={**self.factors, "arm": {arm: known[arm] for arm in arms}})

    def cells(self) -> list[tuple[dict[str, str], list[str]]]:
        """(value of each choice, settings), in order."""
        found = []
        for chosen in itertools.product(*self.factors.values()):
            settings = [word for name, value in zip(self.factors, chosen) for word in self.factors[name][value]]
            found.append((dict(zip(self.factors, chosen, strict=True)), settings))
        return found


CRITICS = ("verifier1", "corrector1", "verifier2", "corrector2")
PICKS = ("random", "balanced", "paired", "adaptive")  # the preset's: Verifiers paired, Correctors balanced
NORMALISE = ("agent", "trajectory", "global", "agent_mean", "agent_std")
ABLATIONS = {
    "drmas": Ablation(
        "cpu_solver_verifier",
        {
            "policies": {"shared": ("agents.verifier.policy=solver",), "separate": ()},
            "normalise": {name: (f"credit.normalise={name}",) for name in NORMALISE},
        },
        ("solver", "verifier"),
        ("solver", "verifier"),
        ("system", "solver", "grad_norm_max", "grad_norm_p99", "grad_spikes"),
        ("normalise", "agent", "trajectory"),
    ),
    "marsrl": Ablation(
        "cpu_default",
        {
            "arm": {
                "whole": (),
                "outcome reward": ("credit.reward_scheme=outcome",),
                "Solver trained": ("credit.train_agents=solver",),
                "critics trained": ("credit.train_agents=[verifier1,corrector1,verifier2,corrector2]",),
                **{f"{pick} picks": tuple(f"agents.{agent}.pick={pick}" for agent in CRITICS) for pick in PICKS},
                "gate off": ("mpt.scope=off",),
                "gate always": ("mpt.entropy=100.0",),
                "4 segments": ("rollout.segments=4",),
                "4 segments, sais": ("rollout.segments=4", "loss.old_policy=sais"),
                "mean of samples": ("loss.aggregation=sequence",),
            }
        },
        ("solver", "verifier1", "corrector1"),
        ("solver", *CRITICS),
        ("system", "solver", "verifier1", "corrector1", "entropy_first", "entropy_last"),
        ("arm", "whole", "outcome reward"),
    ),
    "mars": Ablation(
        "cpu_dual_system",
        {
            "arm": {
                "whole": (),
                "without System 1": ("orchestration_options.distil=false",),
                "without Python": ("tools.python=null",),
                "without balance": ("credit.balance=off",),
                "one mean": ("credit.denominator=all",),
            }
        },
        ("system2",),
        ("system2",),
        ("system", "system2_reward_first", "system2_reward_last", *(f"calls/{name}" for name in ("search", "python"))),
        ("arm", "whole", "without System 1"),
        ("team/calls/search", "team/calls/python", "team/turns_without_call"),
    ),
}
T_95 = {
    2: 12.706,
    3: 4.303,
    4: 3.182,
    5: 2.776,
    6: 2.571,
    7: 2.447,
    8: 2.365,
    9: 2.306,
    10: 2.262,
}  # by number of seeds


def train(name: str, folder: Path, settings: Sequence[str]) -> str | None:
    """The last line of a training that stopped; None: it went to its end."""
    command = [sys.executable, str(ROOT / "trainer" / "main.py"), f"run.dir={folder}", f"run.name={name}", *settings]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        return done.stdout.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return None


def shown(ablation: Ablation, run: Path) -> tuple[dict[str, float], dict[str, list[float | None]]]:
    """What one training has shown, as numbers and as curves (a value a step)."""
    from marsrl.trainer.report.metrics import read_metrics
    from marsrl.trainer.report.summary import load_summary

    rows = [row.values for row in read_metrics(run / "metrics.jsonl")]
    summary = load_summary(run / "summary.json")
    assert summary.before is not None and summary.after is not None
    found = {name: estimate.mean for name, estimate in summary.after.rows.items() if estimate.mean is not None}
    numbers = {agent: found[agent] for agent in ("system", *ablation.evaluated)}
    before = summary.before.rows["system"].mean
    numbers |= {} if before is None else {"system_before": before}
    names = ("actor/entropy", *(f"reward/{agent}/mean" for agent in ablation.agents))
    curves = {name: [row.get(name) for row in rows] for name in names}
    return numbers | gradients(rows) | rewards(rows, ablation.agents) | last_counts(rows, ablation.counted), curves


def gradients(rows: Sequence[Any]) -> dict[str, float]:
    """Largest norm, 99th percentile and spikes of a training; policies have a gradient each."""
    norms = [
        math.hypot(*(value for name, value in row.items() if name.endswith("actor/grad_norm") and value is not None))
        for row in rows
    ]
    spikes = sum(value or 0.0 for row in rows for name, value in row.items() if name.endswith("actor/grad_spikes"))
    p99 = statistics.quantiles(norms, n=100, method="inclusive")[98]
    return {"grad_norm_max": max(norms), "grad_norm_p99": p99, "grad_spikes": spikes}


def rewards(rows: Sequence[Any], agents: Sequence[str]) -> dict[str, float]:
    """Mean reward of each agent and entropy (nats a token) in the first and the last quarter of the steps, and inflation."""
    found: dict[str, float] = {}
    for agent in agents:
        found |= quarters(f"{agent}_reward", [row.get(f"reward/{agent}/mean") for row in rows])
        factors = [row.get(f"drmas/{agent}/variance_inflation") for row in rows]
        known = [factor for factor in factors if factor is not None]
        if known:
            found[f"{agent}_inflation"] = statistics.fmean(known)
    return found | quarters("entropy", [row.get("actor/entropy") for row in rows])


def quarters(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """<name>_first and <name>_last: means over the first and the last quarter of the steps that have one."""
    known = [value for value in values if value is not None]
    if not known:
        return {}
    quarter = max(1, len(known) // 4)
    return {f"{name}_first": statistics.fmean(known[:quarter]), f"{name}_last": statistics.fmean(known[-quarter:])}


def last_counts(rows: Sequence[Any], names: Sequence[str]) -> dict[str, float]:
    """Means of these metrics over the last quarter of the steps; 0 where one is not there, as of a tool that is not set."""
    last = rows[-max(1, len(rows) // 4) :]
    return {name.removeprefix("team/"): statistics.fmean(row.get(name) or 0.0 for row in last) for name in names}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of its 95% interval); infinite for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    t = T_95.get(len(values), 1.96)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def table(ablation: Ablation, records: Sequence[dict[str, Any]]) -> str:
    """Markdown; a row a cell of the ablation."""
    headings = [*ablation.factors, "seeds", *ablation.columns]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for cell, _ in ablation.cells():
        whole = of_cell(records, cell)
        if whole:
            shown = [interval([each[column] for each in whole]) for column in ablation.columns]
            cells = " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in shown)
            lines.append(f"| {' | '.join(cell.values())} | {len(whole)} | {cells} |")
    return "\n".join(lines)


def of_cell(records: Sequence[dict[str, Any]], cell: Mapping[str, str]) -> list[dict[str, float]]:
    """What the trainings of one cell that went to their end have shown, a seed each."""
    mine = [each["found"] for each in records if all(each[name] == value for name, value in cell.items())]
    return [found for found in mine if not isinstance(found, str)]


def headline(ablation: Ablation, records: Sequence[dict[str, Any]]) -> float:
    """NaN where no cell of either kind went to its end."""
    choice, one, other = ablation.ratio
    ratios = []
    for cell, _ in ablation.cells():
        if cell[choice] == one:
            ours, theirs = of_cell(records, cell), of_cell(records, {**cell, choice: other})
            if ours and theirs:
                ratios.append(interval([x["system"] for x in ours])[0] / interval([x["system"] for x in theirs])[0])
    return statistics.geometric_mean(ratios) if ratios else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ablation", choices=list(ABLATIONS))
    parser.add_argument("--arms", nargs="+", help="some of an ablation's arms (default: all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--json", type=Path, help="write every number to this file; trainings that it has are not done again"
    )
    parser.add_argument("--dir", type=Path, help="where the runs go (default: a temporary directory)")
    parser.add_argument("settings", nargs="*", metavar="key.sub=value")
    words = parser.parse_intermixed_args()
    map_marsrl()
    from marsrl.benchmarks.record import read_records, surroundings, write_records

    try:
        ablation = ABLATIONS[words.ablation].only(words.arms)
    except ValueError as error:
        parser.error(str(error))
    records = read_records(words.json)
    if any(not set(ablation.factors) <= record.keys() or record["settings"] != words.settings for record in records):
        parser.error(
            f"--json {words.json} holds trainings of another ablation, or with other settings; name another file"
        )
    done = [{name: record[name] for name in ("seed", *ablation.factors)} for record in records]
    with tempfile.TemporaryDirectory() as temporary:
        for seed in words.seeds:
            for cell, settings in ablation.cells():
                if {"seed": seed, **cell} in done:
                    continue
                name = "-".join([*(value.replace(" ", "_") for value in cell.values()), f"seed{seed}"])
                given = [f"preset={ablation.preset}", f"run.seed={seed}", *settings, *words.settings]
                folder = words.dir or Path(temporary)
                stopped = train(name, folder, given)
                found, curves = (stopped, {}) if stopped else shown(ablation, folder / name)
                record = {**cell, "seed": seed, "found": found, "curves": curves}
                record |= {"settings": words.settings, "surroundings": dataclasses.asdict(surroundings("cpu"))}
                records.append(record)
                print(f"{name}: {found if isinstance(found, str) else _line(found)}", flush=True)
                write_records(words.json, records)
    print(table(ablation, records))
    print(f"ratio: {headline(ablation, records):.3f}")
    return 0


def _line(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in found.items())


if __name__ == "__main__":
    sys.exit(main())
