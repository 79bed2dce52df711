"""A whole run with `trainer.router_replay=rollout`: the local engine records, the trainer forces."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_pool import rows_of, train_here
from small_run import SEED

from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.samples_log import read_samples, sample_files


@pytest.mark.slow
def test_a_run_with_the_local_engine_forces_the_experts_of_decoding(tmp_path: Path) -> None:
    init_model("cpu_default", "arithmetic", tmp_path / "model")
    words = [
        f"policies.main.model={tmp_path / 'model'}", "policies.main.optimizer.lr=0.01", "rollout.engine=local",
        "rollout.placement=local", "rollout.segments=2", "rollout.prompts_per_step=3", "rollout.group_size=4",
        "rollout.max_response_tokens=24", "trainer.router_replay=rollout", "run.steps=3", "run.evaluate=false",
        "loss.entropy_coef=0.01",  # a random model has rewards of 0: without a spread nothing would be trained
        *SEED,
    ]  # fmt: skip
    run = train_here(tmp_path, words)
    steps, samples = rows_of(run), [list(read_samples(file)) for file in sample_files(run).values()]
    assert [len(of_step) for of_step in samples] == [step["rollout/samples"] for step in steps]
    for step, of_step in zip(steps, samples, strict=True):
        # the first stage ends with most samples in the middle, and seldom with a group that has come to its end
        assert ("router/replayed_differ" in step) == bool(of_step)
        if of_step:
            versions = {segment.version for sample in of_step for segment in sample.segments}
            if len(versions) > 1:  # more than half of what older weights have decoded
                assert 0 < step["router/replayed_differ"] < 1
            else:
                # of 200 tokens and more: rounding alone makes next to none
                assert step["router/replayed_differ"] < 1e-2
            assert step["train_rollout/prob_diff_mean"] < 0.05
    assert sum(map(len, samples)) > 0
