"""RL makes the team better: the one property that all the others serve."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from marsrl.trainer.metrics import read_metrics

pytestmark = pytest.mark.slow


def test_the_solvers_reward_rises(runner: object) -> None:
    directory: Path = runner.run(  # type: ignore[attr-defined]
        "learns", "run.steps=14", "run.evaluate=false", "rollout.prompts_per_step=8", "rollout.group_size=8"
    )
    rewards = [row.values["reward/solver/mean"] for row in read_metrics(directory / "metrics.jsonl")]
    first, last = [r for r in rewards[:4] if r is not None], [r for r in rewards[-4:] if r is not None]
    # 4 steps of 64 samples each: a standard error of at most 0.03 for either mean
    assert statistics.fmean(last) > statistics.fmean(first) + 0.1, rewards
