"""RL makes an agent better: the one property that all the others serve."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from desk import boxing_model
from runner import Runner

from marsrl.trainer.report.metrics import read_metrics

pytestmark = pytest.mark.slow

PROMPTS, GROUP_SIZE = 16, 8


def test_the_solvers_reward_rises(runner: Runner, tmp_path: Path) -> None:
    """From a coin, which is right at one half whatever rounds how, to the answer that is rewarded."""
    lines = [{"question": f"What is 7, asked for the {i}th time?", "answer": "7"} for i in range(40)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    directory = runner.run(
        "learns", "task=math", "orchestration=solver", f"policies.main.model={boxing_model(tmp_path / 'model')}",
        f"data.train={tmp_path / 'problems.jsonl'}", "policies.main.dtype=float32", "policies.main.optimizer.lr=5e-3",
        "rollout.engine=local", "rollout.placement=local",  # other tests play with vLLM
        f"rollout.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP_SIZE}", "rollout.max_response_tokens=24",
        "run.steps=10", "run.evaluate=false",
    )  # fmt: skip
    rewards = [row.values["reward/solver/mean"] for row in read_metrics(directory / "metrics.jsonl")]
    # Hoeffding: so far from its expectation is the mean of a step's samples once in 10^9 steps
    far = math.sqrt(math.log(2e9) / 2 / (PROMPTS * GROUP_SIZE))
    assert far < 0.3 and rewards[0] is not None and rewards[-1] is not None
    assert abs(rewards[0] - 0.5) < far and rewards[-1] > 0.5 + far, rewards
