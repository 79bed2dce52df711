"""Dr. MAS and MARS in miniature: the commands of configs/cpu_solver_verifier.yaml, cpu_search_team.yaml and
cpu_dual_system.yaml, a few steps of each. Does the reward rise? `python benchmarks/learning.py preset=cpu_solver_verifier`, and
the other two, ask that.

What so short a warm start leaves depends on the last bits of a processor. So nothing is asked of what a model says, but how it is
counted, credited and trained, whatever it is. Loops that ask for something to have been said are over some hundred samples.
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from commands import run_by
from runner import Runner

from marsrl.rollout.types import Finish
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples, sample_files
from marsrl.trainer.report.summary import load_summary
from marsrl.trainer.runs.directory import RunDirectory

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


Row = dict[str, float | None]


def steps_of(directory: Path) -> Iterator[tuple[Row, list[SampleRecord]]]:
    """(metrics, samples) of each step."""
    files = sample_files(RunDirectory(directory))
    for row in read_metrics(directory / "metrics.jsonl"):
        yield row.values, list(read_samples(files[row.step]))


def check_what_is_trained(
    row: Row, samples: Sequence[SampleRecord], agents: Sequence[str], prefix: str = "", most: int | None = None
) -> None:
    """One update, on all tokens that the policy's agents have sampled: SMALL gives each an entropy bonus.

    most: samples of a group that are trained, with credit.balance=uniform; which of them is left to chance.
    """
    sampled = {agent: row.get(f"cost/{agent}/output_tokens") or 0 for agent in agents}
    for agent in agents:
        groups = defaultdict(list)
        for sample in samples:
            if sample.agent == agent:
                groups[sample.group_id].append(sample.num_tokens)
        left_out = [(sorted(sizes), len(sizes) - (most or len(sizes))) for sizes in groups.values()]
        fewest, largest = (
            sum(sum(sizes[:num] if smallest else sizes[-num:]) for sizes, num in left_out if num > 0)
            for smallest in (True, False)
        )
        assert fewest <= sampled[agent] - (row.get(f"{prefix}actor/{agent}/tokens") or 0) <= largest
    foreign = row.get("rollout/foreign_tokens") or 0
    assert sum(sampled.values()) + foreign == sum(s.num_tokens for s in samples if s.agent in agents)
    assert row[f"{prefix}actor/updates"] == 1 - row[f"{prefix}actor/empty_steps"] == any(sampled.values())  # type: ignore[operator]


def check_credit(samples: Sequence[SampleRecord], outcomes: dict[str, float]) -> None:
    """Whoever had the better outcome of a group has the higher advantage. outcomes: by episode."""
    groups = defaultdict(list)
    for sample in samples:
        assert sample.advantage is not None
        groups[sample.group_id].append((outcomes[sample.uid.partition("/")[0]], sample.advantage))
    for group in groups.values():
        mean = sum(outcome for outcome, _ in group) / len(group)
        for outcome, advantage in group:
            is_even = abs(outcome - mean) < 1e-9
            assert advantage == 0 if is_even else advantage * (outcome - mean) > 0


@pytest.mark.parametrize("command", run_by("test_a_miniature_trains_every_policy_that_it_has"))
def test_a_miniature_trains_every_policy_that_it_has(command: str, runner: Runner) -> None:
    words = shlex.split(command)[2:]
    directory = runner.run("-".join(words).replace("=", "-"), *words, *SMALLER)
    agents = ["solver"] if "orchestration=solver" in words else ["solver", "verifier"]
    policies = ["solver"] if "orchestration=solver" in words or "agents.verifier.policy=solver" in words else agents
    sizes = {"solver": "cpu_default" if "policies.solver.shape=cpu_default" in words else "tiny", "verifier": "tiny"}
    steps = list(steps_of(directory))
    assert len(steps) == 3
    for policy in policies:
        prefix = f"{policy}/" if len(policies) > 1 else ""
        mine = agents if len(policies) == 1 else [policy]
        for number, (row, samples) in enumerate(steps, 1):
            check_what_is_trained(row, samples, mine, prefix)
            assert f"{prefix}actor/grad_spikes" in row
            asked = {sample.agent for sample in samples}  # the Verifier of what the Solver has ended
            has_norm = {agent for agent in agents if f"{prefix}actor/{agent}/grad_norm" in row}
            assert has_norm == (asked & set(mine) if number == 2 else set())  # every second step
        made = json.loads(
            (directory / "checkpoints" / "step_3" / "policies" / policy / "hf" / "config.json").read_text()
        )
        assert made["hidden_size"] == SIZES[sizes[policy]]
    assert {sample.agent for _, samples in steps for sample in samples} == set(agents)
    for row, samples in steps:
        for agent in agents:
            is_asked = any(sample.agent == agent for sample in samples)
            assert ({f"drmas/{agent}/mu", f"drmas/{agent}/sigma"} <= row.keys()) == is_asked
        is_verified = any(sample.agent == "verifier" for sample in samples)
        assert ("verdicts/verifier/recall_wrong" in row) == is_verified


@pytest.mark.parametrize("command", run_by("test_the_search_team_in_miniature_trains_by_its_outcome"))
def test_the_search_team_in_miniature_trains_by_its_outcome(command: str, runner: Runner) -> None:
    words = shlex.split(command)[2:]
    rest = ("warm_start.max_solver_steps=110", "warm_start.short_steps=60", "warm_start.max_team_steps=80")
    rest += ("warm_start.decay_steps=20", "run.steps=3")
    directory = runner.run("search-team", *words, *rest)
    steps = list(steps_of(directory))
    assert len(steps) == 3 and {s.agent for _, samples in steps for s in samples} == {"verifier", "search", "answer"}
    for row, samples in steps:
        check_what_is_trained(row, samples, ("verifier", "search", "answer"))
        outcomes = {s.uid.partition("/")[0]: 0.0 for s in samples}
        outcomes |= {
            s.uid.partition("/")[0]: s.correct for s in samples if s.agent == "answer" and s.correct is not None
        }
        check_credit(samples, outcomes)
        by_uid = {s.uid: s for s in samples}
        queries = [s for s in samples if s.agent == "search" and s.answer is not None]
        assert row["tools/search/calls"] == len(queries)
        told = 0  # errors, by the prompt of whoever reads what the last query has found
        for reader in samples:
            if reader.agent == "verifier" and reader.parent_uid is not None:
                query = by_uid[reader.parent_uid]
                told += reader.prompt.count("<information>error:") - query.prompt.count("<information>error:")
        assert row["tools/search/errors"] == told
    assert sum(row["tools/search/calls"] or 0 for row, _ in steps) > 0
    summary = load_summary(directory / "summary.json")
    assert summary.warm_start is not None and summary.before is not None
    assert summary.warm_start.measured == {"system": summary.before.system.mean}
    assert all(evaluation is not None and evaluation.agents["search"] for evaluation in (summary.before, summary.after))


TEAM = ("turns", "answered", "turns_without_call", "failed_calls", "distillates", "calls/search", "calls/python")
TOLD_AN_ERROR = "<|end|> <|user|> <tool_response> error:"  # whoever samples <|end|> ends: the rest is not the model's
TOLD_TO_GO_ON = "<|end|> <|user|> There was no call of a tool and no answer."


@pytest.mark.parametrize("command", run_by("test_the_dual_system_in_miniature_trains_by_its_outcome"))
def test_the_dual_system_in_miniature_trains_by_its_outcome(command: str, runner: Runner) -> None:
    """From a warm start that is long enough to call tools, and neither to call them as it should nor to be right."""
    words = shlex.split(command)[2:]
    rest = ("warm_start.max_solver_steps=60", "warm_start.short_steps=20", "warm_start.max_team_steps=150")
    rest += ("warm_start.decay_steps=20", "run.steps=3")
    more = ("rollout.prompts_per_step=6", "rollout.group_size=6")  # calls and errors to count
    directory = runner.run("dual-system", *words, *rest, *more)
    steps = list(steps_of(directory))
    assert len(steps) == 3 and {s.agent for _, samples in steps for s in samples} == {"system2", "system1"}
    for row, samples in steps:
        check_what_is_trained(row, samples, ("system2", "system1"), most=6)
        reasoned = [s for s in samples if s.agent == "system2"]
        check_credit(samples, {s.uid.partition("/")[0]: s.correct or 0.0 for s in reasoned})
        assert row["rollout/episodes"] == len(reasoned) == 6 * 6
        team = {name: round((row[f"team/{name}"] or 0) * len(reasoned), 6) for name in TEAM}
        for tool in ("search", "python"):
            assert team[f"calls/{tool}"] == row[f"tools/{tool}/calls"]
        assert team["failed_calls"] == sum(row[f"tools/{tool}/errors"] or 0 for tool in ("search", "python"))
        assert team["answered"] == sum(s.answer is not None for s in reasoned)
        assert team["distillates"] == sum(s.agent == "system1" for s in samples)
        # Each turn but the last one calls or is told what is missing; each error is told, but to those who have no room for it.
        assert team["turns"] == len(reasoned) + team["calls/search"] + team["calls/python"] + team["turns_without_call"]
        told = sum(s.text.count(words) for s in reasoned for words in (TOLD_AN_ERROR, TOLD_TO_GO_ON))
        num_cut = sum(s.finish is Finish.LENGTH for s in reasoned)
        assert 0 <= team["failed_calls"] + team["turns_without_call"] - told <= num_cut
    assert sum(row[f"tools/{tool}/calls"] or 0 for row, _ in steps for tool in ("search", "python")) > 0
    summary = load_summary(directory / "summary.json")
    assert summary.warm_start is not None and summary.before is not None and summary.after is not None
    assert summary.warm_start.measured == {"system": summary.before.system.mean}
