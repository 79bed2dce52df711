"""Dr. MAS and MARS in miniature: the commands of configs/cpu_solver_verifier.yaml, cpu_search_team.yaml and
cpu_dual_system.yaml, a few steps of each. Does the reward rise? `python benchmarks/learning.py preset=cpu_solver_verifier`, and
the other two, ask that."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
from runner import Runner

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))  # commands
from commands import run_by

from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import load_summary

pytestmark = pytest.mark.slow

SMALLER = (
    "warm_start.max_solver_steps=60",
    "warm_start.short_steps=20",
    "warm_start.max_team_steps=40",
    "warm_start.decay_steps=20",
    "warm_start.table_drills=64",  # what one digit in ten needs is how to say it, not what is right
    "warm_start.equality_drills=16",
    "trainer.agent_grad_norm_every=2",
    "run.steps=3",
)
SIZES = {"tiny": 64, "cpu_default": 96}  # hidden


@pytest.mark.parametrize("command", run_by("test_a_miniature_trains_every_policy_that_it_has"))
def test_a_miniature_trains_every_policy_that_it_has(command: str, runner: Runner) -> None:
    words = shlex.split(command)[2:]
    directory = runner.run("-".join(words).replace("=", "-"), *words, *SMALLER)
    agents = ["solver"] if "orchestration=solver" in words else ["solver", "verifier"]
    policies = ["solver"] if "orchestration=solver" in words or "agents.verifier.policy=solver" in words else agents
    sizes = {"solver": "cpu_default" if "policies.solver.shape=cpu_default" in words else "tiny", "verifier": "tiny"}
    rows = [row.values for row in read_metrics(directory / "metrics.jsonl")]
    assert len(rows) == 3
    for policy in policies:
        prefix = f"{policy}/" if len(policies) > 1 else ""
        assert sum(row[f"{prefix}actor/updates"] or 0 for row in rows) > 0
        assert all(f"{prefix}actor/grad_spikes" in row for row in rows)
        mine = agents if len(policies) == 1 else [policy]
        assert [agent for agent in agents if f"{prefix}actor/{agent}/grad_norm" in rows[1]] == mine
        assert not any(f"actor/{agent}/grad_norm" in name for agent in agents for name in rows[0])  # every second step
        made = json.loads(
            (directory / "checkpoints" / "step_3" / "policies" / policy / "hf" / "config.json").read_text()
        )
        assert made["hidden_size"] == SIZES[sizes[policy]]
    for agent in agents:
        assert {f"drmas/{agent}/mu", f"drmas/{agent}/sigma"} <= rows[0].keys()
    assert ("verdicts/verifier/recall_wrong" in rows[0]) == (len(agents) == 2)


@pytest.mark.parametrize("command", run_by("test_the_search_team_in_miniature_trains_by_its_outcome"))
def test_the_search_team_in_miniature_trains_by_its_outcome(command: str, runner: Runner) -> None:
    """From a warm start that is long enough for an answer in four to be right."""
    words = shlex.split(command)[2:]
    steps = ("warm_start.max_solver_steps=110", "warm_start.short_steps=60", "warm_start.max_team_steps=80")
    rest = ("warm_start.decay_steps=20", "run.steps=3")
    directory = runner.run("search-team", *words, *steps, *rest)
    rows = [row.values for row in read_metrics(directory / "metrics.jsonl")]
    assert len(rows) == 3 and sum(row["actor/updates"] or 0 for row in rows) > 0
    for agent in ("verifier", "search", "answer"):
        assert sum(row.get(f"actor/{agent}/tokens") or 0 for row in rows) > 0
    assert all(row["tools/search/calls"] and not row["tools/search/errors"] for row in rows)
    summary = load_summary(directory / "summary.json")
    assert summary.warm_start is not None and summary.before is not None
    assert summary.warm_start.measured == {"system": summary.before.system.mean}
    assert all(evaluation is not None and evaluation.agents["search"] for evaluation in (summary.before, summary.after))


@pytest.mark.parametrize("command", run_by("test_the_dual_system_in_miniature_trains_by_its_outcome"))
def test_the_dual_system_in_miniature_trains_by_its_outcome(command: str, runner: Runner) -> None:
    """From a warm start that is long enough to call tools, and not to be right."""
    words = shlex.split(command)[2:]
    steps = ("warm_start.max_solver_steps=60", "warm_start.short_steps=20", "warm_start.max_team_steps=150")
    more = ("rollout.prompts_per_step=6", "rollout.group_size=6")  # a poor team is seldom right
    rest = ("warm_start.decay_steps=20", "run.steps=3")
    directory = runner.run("dual-system", *words, *steps, *more, *rest)
    rows = [row.values for row in read_metrics(directory / "metrics.jsonl")]
    assert len(rows) == 3 and sum(row["actor/updates"] or 0 for row in rows) > 0
    for system in ("system2", "system1"):
        assert sum(row.get(f"actor/{system}/tokens") or 0 for row in rows) > 0
    for tool in ("search", "python"):
        assert (
            sum(row[f"team/calls/{tool}"] or 0 for row in rows)
            > 0
            == sum(row[f"tools/{tool}/errors"] or 0 for row in rows)
        )
    assert sum(row["team/distillates"] or 0 for row in rows) > 0
    summary = load_summary(directory / "summary.json")
    assert summary.warm_start is not None and summary.before is not None and summary.after is not None
    assert summary.warm_start.measured == {"system": summary.before.system.mean}
