"""Trainings (arms) behind docs/evidence.md, which differ in one choice each, and their metrics. evidence.py runs them.

marsrl   MarsRL and UloRL (arXiv:2511.11373, 2507.19766) on configs/cpu_default.yaml
drmas    Dr. MAS (arXiv:2602.08847) on configs/cpu_solver_verifier.yaml, whose agents' mean rewards differ on purpose
mars     MARS (arXiv:2510.04935) on configs/cpu_dual_system.yaml
refill   rollout.refill with a Solver alone, on configs/cpu_solver_verifier.yaml
adapters "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025) on configs/cpu_adapters.yaml
foreign  MarsRL's Table 3: the trained team of the arm `whole` of the study marsrl, with other Solvers
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREE, FIVE = 3, 5


@dataclass(frozen=True)
class Arm:
    """Arm (variant) of a study. settings: changes to the study's preset. num_seeds: 5 for arms that test a claim of a paper."""

    settings: tuple[str, ...] = ()
    num_seeds: int = THREE


@dataclass(frozen=True)
class Study:
    """Study of several arms. evaluated: rows of the evaluation to store. agents: agents whose rewards are stored.

    counted: metrics whose means over the last quarter of the steps are stored. has_curve: the arms also evaluate during training.
    """

    preset: str
    arms: Mapping[str, Arm]
    evaluated: tuple[str, ...]
    agents: tuple[str, ...]
    counted: tuple[str, ...] = ()
    has_curve: bool = False


CRITICS = ("verifier1", "corrector1", "verifier2", "corrector2")
PICKS = ("random", "balanced", "paired", "adaptive")  # the preset uses paired for Verifiers and balanced for Correctors
NORMALISE = {"agent": FIVE, "trajectory": FIVE, "global": FIVE, "agent_mean": THREE, "agent_std": THREE}
SOLVER_ALONE, CRITICS_ALONE = "credit.train_agents=solver", f"credit.train_agents=[{','.join(CRITICS)}]"
TRAJECTORY = "rollout.pipeline=trajectory"
ADAPTED = (  # a Solver and a Verifier on one frozen base
    "policies.solver.adapter={rank: 8, alpha: 16, targets: [attention, mlp]}",
    "policies.verifier={base: solver, adapter: {rank: 8, alpha: 16, targets: [attention, mlp]}}",
    *(f"policies.{agent}.optimizer.lr=6.0e-3" for agent in ("solver", "verifier")),
)
POLICIES = {"shared": ("agents.verifier.policy=solver",), "separate": (), "adapters": ADAPTED}
TEAM = ("solver", *CRITICS)
WHOLE_WEIGHTS = ("base=null", "dtype=float32", "adapter=null", "optimizer.lr=6.0e-4")
STRONG = "warm_start.slip_solver=0.04"  # a Solver that is mostly right from the start, as in the papers
REFILL = "rollout.refill={groups: 6, most: 2.0}"  # a step begins with 8 problems, and needs 6 groups with spread
MOSTLY_RIGHT = ("orchestration=solver", STRONG, "run.eval_every=3", "run.keep_best=false")

STUDIES = {
    "marsrl": Study(
        "cpu_default",
        {
            "whole": Arm(num_seeds=FIVE),
            "own rewards": Arm((TRAJECTORY,), FIVE),
            "outcome reward": Arm((TRAJECTORY, "credit.reward_scheme=outcome"), FIVE),
            "Solver trained": Arm((SOLVER_ALONE,), FIVE),
            "critics trained": Arm((CRITICS_ALONE,), FIVE),
            "a mean of each agent": Arm(("credit.denominator=agent",)),
            "strong Solver, whole": Arm((STRONG,)),
            "strong Solver, Solver trained": Arm((STRONG, SOLVER_ALONE)),
            "strong Solver, critics trained": Arm((STRONG, CRITICS_ALONE)),
            **{f"{pick} picks": Arm(tuple(f"agents.{agent}.pick={pick}" for agent in CRITICS)) for pick in PICKS},
            "gate off": Arm(("mpt.scope=off",)),
            "gate always": Arm(("mpt.entropy=100.0",)),
            "4 segments": Arm(("rollout.segments=4",)),
            "4 segments, sais": Arm(("rollout.segments=4", "loss.old_policy=sais")),
            "mean of samples": Arm(("loss.aggregation=sequence",)),
        },
        ("solver", "verifier1", "corrector1"),
        TEAM,
    ),
    "drmas": Study(
        "cpu_solver_verifier",
        {
            f"{policies}, {name}": Arm((*settings, f"credit.normalise={name}"), num_seeds)
            for policies, settings in POLICIES.items()
            for name, num_seeds in NORMALISE.items()
        },
        ("solver", "verifier"),
        ("solver", "verifier"),
    ),
    "mars": Study(
        "cpu_dual_system",
        {
            "whole": Arm(num_seeds=FIVE),
            "without System 1": Arm(("orchestration_options.distil=false",), FIVE),
            "without System 1, refill": Arm(("orchestration_options.distil=false", REFILL), FIVE),
            "without Python": Arm(("tools.python=null",), FIVE),
            "without balance": Arm(("credit.balance=off",), FIVE),
            "one mean": Arm(("credit.denominator=all",), FIVE),
        },
        ("system2",),
        ("system2",),
    ),
    "refill": Study(
        "cpu_solver_verifier",
        {
            "as it is": Arm(MOSTLY_RIGHT, FIVE),
            "refill": Arm((*MOSTLY_RIGHT, REFILL), FIVE),
            "16 problems": Arm((*MOSTLY_RIGHT, "rollout.prompts_per_step=16"), FIVE),
            "refill, dead groups not counted": Arm((*MOSTLY_RIGHT, REFILL, "credit.count_zero_groups=false"), FIVE),
        },
        ("solver",),
        ("solver",),
        has_curve=True,
    ),
    "adapters": Study(
        "cpu_adapters",
        {
            "adapters": Arm(),
            "shared weights": Arm(tuple(f"agents.{agent}.policy=main" for agent in TEAM)),
            "separate weights": Arm(tuple(f"policies.{agent}.{word}" for agent in TEAM for word in WHOLE_WEIGHTS)),
        },
        ("solver", "verifier1", "corrector1"),
        TEAM,
        ("sync/bytes",),
    ),
}

FOREIGN_SEEDS = FIVE
FOREIGN = ("own team", "untrained", "trained", "untrained, another kind", "trained, another kind")
"""Teams to evaluate, in the study `foreign`. The Solver is the team's own, the warm start of another seed, or one of another kind
(another shape, tutor and mistakes). Verifier and Corrector are those of the seed before training ("untrained") or after training.
"""
# A model of 107,456 instead of 568,416 parameters. It errs mostly at + and -, whereas the team's own tutors err mostly at *.
OTHER_KIND = (
    "policies.main.shape=tiny",
    "task_options={slip_add: 1.0, slip_subtract: 1.0, slip_multiply: 0.1}",
    "warm_start.slip_solver=0.15",
)

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # quantiles of Student's t, by number of seeds


def shown(study: Study, run: Path) -> dict[str, float]:
    """Return the numbers to store for one training."""
    from marsrl.trainer.report.metrics import read_metrics
    from marsrl.trainer.report.summary import load_summary

    rows = [row.values for row in read_metrics(run / "metrics.jsonl")]
    summary = load_summary(run / "summary.json")
    assert summary.before is not None and summary.after is not None
    values = {name: estimate.mean for name, estimate in summary.after.rows.items() if estimate.mean is not None}
    numbers = {name: values[name] for name in ("system", *study.evaluated) if name in values}
    before = {name: estimate.mean for name, estimate in summary.before.rows.items() if estimate.mean is not None}
    numbers |= {f"{name}_before": before[name] for name in ("system", *study.evaluated) if name in before}
    numbers |= trained(rows, study.agents) | gradients(rows) | rewards(rows, study.agents)
    return numbers | last_counts(rows, study.counted)


def curves(run: Path) -> dict[str, list[float]]:
    """Return the team's accuracy before, during (run.eval_every) and after a training, with tokens and seconds spent until then.

    tokens: number of tokens decoded for training. step_seconds: seconds of the steps, without evaluations.
    """
    from marsrl.trainer.report.metrics import read_metrics
    from marsrl.trainer.report.summary import load_summary

    summary = load_summary(run / "summary.json")
    assert summary.before is not None and summary.before.system.mean is not None
    assert summary.after is not None and summary.after.system.mean is not None
    curve = {"system": [summary.before.system.mean], "tokens": [0.0], "step_seconds": [0.0]}
    tokens = seconds = 0.0
    for row in read_metrics(run / "metrics.jsonl"):
        tokens += row.values.get("rollout/tokens") or 0.0
        seconds += (row.values.get("timing_s/total") or 0.0) - (row.values.get("timing_s/evaluate") or 0.0)
        if (accuracy := row.values.get("eval/system")) is not None and row.step < summary.steps:
            for name, value in (("system", accuracy), ("tokens", tokens), ("step_seconds", seconds)):
                curve[name].append(value)
    for name, value in (("system", summary.after.system.mean), ("tokens", tokens), ("step_seconds", seconds)):
        curve[name].append(value)
    return curve


def trained(rows: Sequence[Any], agents: Sequence[str]) -> dict[str, float]:
    """Return the number of updates, of steps that trained nothing, and of trained tokens, in total and by agent."""
    updates = [sum(_of(row, "actor/updates")) for row in rows]
    numbers = {"updates": float(sum(updates)), "empty_steps": float(sum(not num_updates for num_updates in updates))}
    tokens = {agent: sum(sum(_of(row, f"actor/{agent}/tokens")) for row in rows) for agent in agents}
    return numbers | {f"{agent}_tokens": float(num) for agent, num in tokens.items()}


def gradients(rows: Sequence[Any]) -> dict[str, float]:
    """Return the largest gradient norm and the number of spikes; the gradients of several policies count as one vector."""
    norms = [math.hypot(*_of(row, "actor/grad_norm")) for row in rows]
    spikes = sum(sum(_of(row, "actor/grad_spikes")) for row in rows)
    return {"grad_norm_max": max(norms), "grad_spikes": spikes}


def _of(row: Any, metric: str) -> list[float]:
    """Return this metric of every policy; with several policies, the metric's name begins with the policy's name."""
    return [value for name, value in row.items() if f"/{name}".endswith(f"/{metric}") and value is not None]


def rewards(rows: Sequence[Any], agents: Sequence[str]) -> dict[str, float]:
    """Return mean reward of each agent and entropy (nats per token) in the first and the last quarter of the steps."""
    numbers: dict[str, float] = {}
    for agent in agents:
        numbers |= quarters(f"{agent}_reward", [row.get(f"reward/{agent}/mean") for row in rows])
    return numbers | quarters("entropy", [row.get("actor/entropy") for row in rows])


def quarters(name: str, values: Sequence[float | None]) -> dict[str, float]:
    """Return <name>_first and <name>_last, means over the first and the last quarter of the steps that have a value."""
    known_values = [value for value in values if value is not None]
    if not known_values:
        return {}
    quarter = max(1, len(known_values) // 4)
    return {
        f"{name}_first": statistics.fmean(known_values[:quarter]),
        f"{name}_last": statistics.fmean(known_values[-quarter:]),
    }


def last_counts(rows: Sequence[Any], names: Sequence[str]) -> dict[str, float]:
    """Return the means of these metrics over the last quarter of the steps and over policies; missing metrics are 0."""
    last = rows[-max(1, len(rows) // 4) :]

    def value(row: Any, name: str) -> float:
        of_policies = [number or 0.0 for key, number in row.items() if key.endswith(f"/{name}")]
        return row.get(name) or 0.0 if name in row or not of_policies else statistics.fmean(of_policies)

    return {name: statistics.fmean(value(row, name) for row in last) for name in names}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean, half-width of its 95% interval by Student's t), which is infinite for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.inf
    t = T_95.get(len(values), 1.96)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))
