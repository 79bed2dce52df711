"""Adapters, Dr. MAS and MARS in miniature: two steps of the commands of configs/cpu_adapters.yaml, cpu_solver_verifier.yaml,
cpu_search_team.yaml and cpu_dual_system.yaml. `python benchmarks/learning.py preset=cpu_solver_verifier` (or another of these)
measures whether the reward rises. test_scripted_team.py tests how tools are counted and outcomes credited, with scripted agents.

The result of such a short warm start depends on a processor's last bits, so these tests check nothing that a model says.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from documented_commands import run_by
from small_run import SMALL, Runner, run_here

from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.report.summary import load_summary
from marsrl.trainer.runs.directory import RunDirectory, step_files

pytestmark = pytest.mark.slow

SMALLER = (
    "warm_start.max_solver_steps=20",
    "warm_start.short_steps=10",
    "warm_start.max_team_steps=12",
    "warm_start.decay_steps=6",
    "warm_start.table_drills=64",  # a few drills suffice: the team must learn the form of an answer, not the right one
    "warm_start.equality_drills=16",
    "trainer.agent_grad_norm_every=2",
    "evaluate.num_problems=4",
    "run.steps=2",
)


def train(runner: Runner, name: str, command: str, *more: str) -> Path:
    """Run a documented command in this process, with the other runs' caches, and return its directory."""
    os.environ["MARSRL_CACHE"] = str(runner.cache)
    run_here([f"run.dir={runner.folder}", f"run.name={name}", *SMALL, *shlex.split(command)[2:], *SMALLER, *more])
    return runner.folder / name


Row = dict[str, float | None]
Steps = list[tuple[Row, list[SampleRecord]]]


def steps_of(directory: Path) -> Steps:
    """Return (metrics, samples) of each step."""
    files = step_files(RunDirectory(directory).samples)
    return [(row.values, list(read_samples(files[row.step]))) for row in read_metrics(directory / "metrics.jsonl")]


def check_updates(steps: Steps, prefix: str, agents: list[str]) -> None:
    """Check that each step which called the policy's agents made one update: SMALL sets an entropy bonus, so all tokens train."""
    assert len(steps) == 2
    for row, samples in steps:
        is_asked = any(sample.agent in agents for sample in samples)
        assert row[f"{prefix}actor/updates"] == 1 - (row[f"{prefix}actor/empty_steps"] or 0) == is_asked
        assert f"{prefix}actor/grad_spikes" in row


@pytest.mark.parametrize("command", run_by("test_a_solver_and_a_verifier_of_their_own_sizes_train"))
def test_a_solver_and_a_verifier_of_their_own_sizes_train(command: str, runner: Runner) -> None:
    directory = train(runner, "two-policies", command)
    steps = steps_of(directory)
    for policy, hidden in {"solver": 96, "verifier": 64}.items():
        check_updates(steps, f"{policy}/", [policy])
        for number, (row, samples) in enumerate(steps, 1):
            # The Verifier is only asked about solutions that ended.
            is_asked = any(sample.agent == policy for sample in samples)
            assert ({f"drmas/{policy}/mu", f"drmas/{policy}/sigma"} <= row.keys()) == is_asked
            has_norm = f"{policy}/actor/{policy}/grad_norm" in row
            assert has_norm == (is_asked and number == 2)  # trainer.agent_grad_norm_every=2
        file = directory / "checkpoints" / "step_2" / "policies" / policy / "hf" / "config.json"
        assert json.loads(file.read_text())["hidden_size"] == hidden
    for row, samples in steps:
        is_verified = any(sample.agent == "verifier" for sample in samples)
        assert ("verdicts/verifier/recall_wrong" in row) == is_verified


@pytest.mark.parametrize("command", run_by("test_the_five_adapters_in_miniature_train"))
def test_the_five_adapters_in_miniature_train(command: str, runner: Runner) -> None:
    directory = train(runner, "adapters", command, "agents.verifier1.pick=random")
    steps = steps_of(directory)
    agents = ["solver", "verifier1", "corrector1", "verifier2", "corrector2"]
    for agent in agents:
        check_updates(steps, f"{agent}/", [agent])
    trained = {agent for row, _ in steps for agent in agents if row[f"{agent}/actor/updates"]}
    assert {"solver", "verifier1"} <= trained
    kept = {folder.name for folder in (directory / "checkpoints" / "step_2" / "policies").iterdir()}
    assert kept == set(agents)  # the untrained base is not checkpointed


@pytest.mark.parametrize("command", run_by("test_a_team_in_miniature_trains"))
def test_a_team_in_miniature_trains(command: str, runner: Runner) -> None:
    """The team is warm-started from its tutor and evaluated, and its only policy is trained."""
    is_search = command.endswith("cpu_search_team")
    agents = ["verifier", "search", "answer"] if is_search else ["system2", "system1"]
    directory = train(runner, "search-team" if is_search else "dual-system", command)
    steps = steps_of(directory)
    assert {sample.agent for _, samples in steps for sample in samples} <= set(agents)
    check_updates(steps, "", agents)
    assert all(row["actor/updates"] == 1 for row, _ in steps)
    summary = load_summary(directory / "summary.json")
    assert summary.before is not None and summary.after is not None
