"""A model and data of the user's own: a random checkpoint on grade-school problems, through the whole loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marsrl.trainer.init_model import init_model
from marsrl.trainer.metrics import read_metrics
from marsrl.trainer.summary import load_summary

pytestmark = pytest.mark.slow

GSM8K = [
    ("Tom has 3 apples and buys 4 more. How many apples has he?", "He has 3 + 4 = 7 apples.\n#### 7"),
    ("A box holds 6 eggs. How many eggs are in 5 boxes?", "5 * 6 = <<5*6=30>>30.\n#### 30"),
    ("Ann had 9 pens and lost 2. How many are left?", "9 - 2 = 7\n#### 7"),
    ("A train goes 60 miles an hour for 2 hours. How far?", "60 * 2 = 120\n#### 120"),
]


def test_an_untrained_model_on_math_runs_and_trains_nothing(tmp_path: Path, runner: object) -> None:
    """Rewards are 0, so no group has spread: each step is counted as empty and passes, and nothing is NaN."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in GSM8K * 8))
    model = init_model("tiny", "bytes", tmp_path / "model")
    directory = runner.run(  # type: ignore[attr-defined]
        "own", "task=math", f"policies.main.model={model}", "policies.main.dtype=float32", f"data.train={data}",
        "rollout.max_response_tokens=24", "run.steps=2", "evaluate.num_problems=2",
    )  # fmt: skip
    rows = read_metrics(directory / "metrics.jsonl")
    assert [row.step for row in rows] == [1, 2]
    for row in rows:
        assert row.values["reward/solver/mean"] == 0
        assert row.values["actor/empty_steps"] == 1
        assert "metrics/non_finite" not in row.values
        assert None not in row.values.values()
    summary = load_summary(directory / "summary.json")
    assert summary.verified_syncs == 1  # no new version was made
    assert summary.after is not None and summary.after.solver.mean == 0
