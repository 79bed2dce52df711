"""A random checkpoint on grade-school problems, through the whole loop with our own engine; with vLLM, as it is written
in README: tests/docs/test_whole_runs.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import run_here

from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import load_summary

pytestmark = pytest.mark.slow

GSM8K = [
    (f"Tom has {i} apples and buys 4 more. How many apples has he?", f"He has {i} + 4 = {i + 4} apples.\n#### {i + 4}")
    for i in range(20)
]


def test_an_untrained_model_on_math_runs_and_trains_nothing(tmp_path: Path) -> None:
    """In bfloat16, the default. Rewards are 0, so no group has spread: each step is counted as empty, and nothing is NaN."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in GSM8K * 2))
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = [
        "task=math", f"policies.main.model={model}", f"data.train={data}", f"run.dir={tmp_path}", "run.name=own",
        "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=2", "rollout.group_size=2",
        "rollout.max_response_tokens=12", "run.steps=2",
        "evaluate={num_problems: 2, fixed_inputs: 1, accept_after: 1, max_iterations: 1}",
    ]  # fmt: skip
    run_here(words)
    directory = tmp_path / "own"
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2]
    for row in rows:
        assert row.values["reward/solver/mean"] == 0
        assert row.values["actor/empty_steps"] == 1
        assert "metrics/non_finite" not in row.values
        assert None not in row.values.values()
    summary = load_summary(directory / "summary.json")
    assert summary.verified_syncs == 1  # no new version was made
    assert summary.engine.dtype == "bfloat16"
    assert summary.after is not None and summary.after.agents["solver"].mean == 0


def test_problems_are_held_out_of_the_training_file_where_no_other_is_given(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in GSM8K * 2))
    model = init_model("tiny", "bytes", tmp_path / "model")
    words = ["task=math", f"policies.main.model={model}", f"data.train={data}"]
    checked = preflight(read_config(None, words)[0], world_size=1)
    held_out = {p.question for p in checked.task.held_out(100, 0)}
    source = checked.task.problems(0)
    trained = {source.next_problem().question for _ in range(200)}
    assert len(held_out) == 2  # a tenth of 20 questions
    assert checked.problems.num_taken == 4  # each of them stands in the file twice
    assert not held_out & trained
    assert len(held_out | trained) == 20
