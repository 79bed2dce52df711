"""A whole run with `trainer.router_replay=rollout`: the local engine records, the trainer forces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import run_here

from marsrl.trainer.models.init_model import init_model


@pytest.mark.slow
def test_a_run_with_the_local_engine_forces_the_experts_of_decoding(tmp_path: Path) -> None:
    init_model("cpu_default", "arithmetic", tmp_path / "model")
    words = [
        f"policies.main.model={tmp_path / 'model'}", "policies.main.optimizer.lr=0.01", "rollout.engine=local",
        "rollout.placement=local", "rollout.segments=2", "rollout.prompts_per_step=3", "rollout.group_size=4",
        "rollout.max_response_tokens=24", "trainer.router_replay=rollout", "run.steps=3", "run.evaluate=false",
        "loss.entropy_coef=0.01",  # a random model has rewards of 0: without a spread nothing would be trained
        f"run.dir={tmp_path}", "run.name=run",
    ]  # fmt: skip
    run_here(words)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differ = [step["router/replayed_differ"] for step in steps if "router/replayed_differ" in step]
    assert len(differ) == 2  # the first stage ends with every sample in the middle
    assert 0 < differ[1] < 1  # samples of two segments, of which the second was decoded by newer weights
    assert all(step["train_rollout/prob_diff_mean"] < 0.05 for step in steps if "router/replayed_differ" in step)
