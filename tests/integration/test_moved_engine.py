"""A real run of two policies, in which an engine in a Ray actor moves from one to the other (about 40 s).

Weights come from the trainer's memory (sync.backend=auto with its CPU twin): no file has them for the engine that moves. When one
is to move: tests/rollout/test_rebalance.py; by files: tests/engines/test_pool.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from scripted_pool import opened, rows_of, sevens

from marsrl.rollout.pool import rebalance
from marsrl.rollout.pool.rebalance import Move, PolicyEngines
from marsrl.trainer.loop import train
from marsrl.trainer.models.init_model import init_model


@pytest.mark.slow
def test_an_engine_that_has_moved_decodes_with_the_weights_of_its_new_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(policies: Mapping[str, PolicyEngines]) -> Move | None:
        return Move("verifier", "solver", 1, "as the test wants it") if policies["solver"].engines == 1 else None

    monkeypatch.setattr(rebalance, "wanted", told)
    own = f"model: {init_model('tiny', 'bytes', tmp_path / 'model')}, dtype: float32, optimizer: {{lr: 0.005}}"
    settings = [
        "task=math", "orchestration=solver_verifier", f"policies={{solver: {{{own}}}, verifier: {{{own}, engines: 2}}}}",
        "agents={solver: {policy: solver}, verifier: {policy: verifier}}", f"data.train={sevens(tmp_path)}",
        "rollout.engine=local", "rollout.threads=1", "rollout.object_store_mib=80", "rollout.rebalance=true",
        "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_response_tokens=60",
        "rollout.pipeline=trajectory", "run.steps=4", "run.evaluate=false", "trainer.threads=1", "loss.entropy_coef=0.01",
        "sync.cpu_twin=true",
    ]  # fmt: skip
    with opened(tmp_path, settings) as run:
        train(run)
        assert run.driver is not None
        assert all(run.driver.team.pools["solver"].num_decoded(within_s=300))
    rows = rows_of(run.directory)
    assert [row["rollout/engine_moves"] for row in rows] == [0, 0, 1, 0]
    assert [row["rollout/engines/solver"] for row in rows] == [1, 1, 2, 2]
    assert [row["rollout/engines/verifier"] for row in rows] == [2, 2, 1, 1]
    assert "an engine of verifier has moved to solver; engines now: solver 2, verifier 1" in capsys.readouterr().err
    for row in rows:
        assert row["sync/direct"] == 1 and row["rollout/engine_restarts"] == 0
        # the Verifier is asked of what the Solver has ended: a random model ends by chance
        for name in ("solver", *(["verifier"] if row.get("cost/verifier/output_tokens") else [])):
            assert row[f"cost/{name}/seconds"] == row[f"policy_cost/{name}/seconds"] > 0
        # the trainer gives its tokens the same probabilities, but to those whose routers find two experts equally good
        assert row["solver/train_rollout/prob_diff_mean"] < 1e-5
