"""Real runs with engines in Ray actors.

In the first run (about 50 s), an engine is killed while it waits for a bucket of weights, with the CPU twins of nccl and ipc, and
again during a stage; later Ray's head is killed. In the second run (about 40 s), an engine moves between policies.

Weights come from the trainer's memory (sync.backend=auto with its CPU twin), so a new engine cannot read them from a file.
tests/engines/test_pool.py tests weights from files, and tests/rollout/test_rebalance.py tests when engines move.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from engine_cases import actors, descendants
from scripted_pool import on_sevens, opened, rows_of, samples_of
from small_run import sevens

from marsrl.rollout.pool import rebalance
from marsrl.rollout.pool.rebalance import Move, PolicyEngines
from marsrl.rollout.weights.connections import GroupConnection, SharedBuffer
from marsrl.rollout.weights.files import parent_of
from marsrl.trainer.learner.learner import Together
from marsrl.trainer.loop import train
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.trace import read_trace
from marsrl.trainer.run import Run
from marsrl.trainer.runs.failure import failure_message
from marsrl.trainer.runs.manifest import damage
from marsrl.trainer.weights.comparison import CheckedEngines
from marsrl.trainer.weights.sync import DirectSync


def children(name: str) -> list[psutil.Process]:
    """Return our children whose name begins with this."""
    ours = set(descendants())
    return [each for each in psutil.process_iter(["name"]) if each in ours and each.info["name"].startswith(name)]


def kill(name: str) -> None:
    for child in children(name):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def kill_in_publishes(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kill the engine when the third bucket of version 1, and of version 2, is due. Version 2 is sent by ipc.

    Returns a list that gets (kind of sync, restarts so far) after each publish.
    """
    assert run.driver is not None
    pool, publish, given = run.driver.team.pools["main"], run.publish, run.syncs["main"]
    assert isinstance(given, DirectSync) and given._sender.kind == "nccl"
    engines = CheckedEngines(pool, vocab_size=run.learners["main"].vocab_size)
    nccl = DirectSync(engines, torch.float32, "nccl", bucket_bytes=1 << 14, sends_deltas=True)
    ipc = DirectSync(engines, torch.float32, "ipc", bucket_bytes=1 << 14)
    publishes: list[tuple[str, int]] = []

    def published(group: Together, is_new: Mapping[str, bool]) -> None:
        (policy,) = is_new
        sync = run.syncs[policy] = ipc if run.versions[policy] == 1 else nccl  # type: ignore[index]
        numbers = itertools.count(1)
        with monkeypatch.context() as patch:
            for kind, method in ((GroupConnection, "send"), (SharedBuffer, "hand_over")):
                move = getattr(kind, method)

                def struck(self: object, *args: object, move: Callable[..., None] = move) -> None:
                    if next(numbers) == 3 and run.versions[policy] <= 2:
                        kill("ray::Engine")
                    move(self, *args)

                patch.setattr(kind, method, struck)
            publish(group, is_new)
        assert next(numbers) > 3  # there was a third bucket
        publishes.append((sync._sender.kind, pool.generation))

    monkeypatch.setattr(run, "publish", published)
    return publishes


def strikes(run: Run) -> threading.Thread:
    """Start a thread that kills the engine when it decodes, from step 3 on, and Ray's head from step 5 on."""
    assert run.driver is not None
    pool = run.driver.team.pools["main"]

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            time.sleep(0.005)

    def wait_for_tokens() -> None:
        before = sum(pool.num_decoded())
        wait(lambda: sum(pool.num_decoded()) > before + 50)

    def strike() -> None:
        wait(lambda: run.step >= 3)
        while True:
            wait_for_tokens()
            engine = actors()[-1]
            engine.suspend()
            time.sleep(1)  # results that were already sent arrive
            if pool.num_under_way:
                break
            engine.resume()
        engine.kill()
        wait(lambda: run.step >= 5)
        wait_for_tokens()
        kill("gcs_server")

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_killed_engine_costs_time_and_a_killed_ray_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = init_model("tiny", "bytes", tmp_path / "model")
    settings = on_sevens(
        tmp_path, model, "policies.main.optimizer.lr=0.005", "rollout.threads=1", "rollout.object_store_mib=80",
        "rollout.placement=disaggregated",
        "rollout.max_response_tokens=200", "run.steps=1000", "run.evaluate=false", "run.checkpoint_every=1",
        "trainer.threads=1", "loss.entropy_coef=0.01", "sync.cpu_twin=true",
    )  # fmt: skip
    named = pytest.raises(RuntimeError, match=r"Ray is gone: its gcs_server \(process [0-9]+\) has ended")
    with named as failure, opened(tmp_path, settings) as run:
        directory = run.directory
        published = kill_in_publishes(run, monkeypatch)
        struck_later = strikes(run)
        train(run)
    struck_later.join()
    assert psutil.wait_procs(children("ray"), timeout=300)[1] == []
    rows = {row.step: row.values for row in read_metrics(directory.metrics)}
    last = max(rows)
    assert sorted(rows) == list(range(1, last + 1)) and last >= 4
    assert published[:3] == [("nccl", 1), ("ipc", 2), ("nccl", 3)]
    (struck,) = (step for step, row in rows.items() if row["rollout/resubmitted"])
    assert struck >= 3 and sum(row["rollout/engine_restarts"] for row in rows.values()) == 3
    assert all(row["sync/direct"] == 1 for row in rows.values())
    assert 0 < rows[struck]["rollout/resubmitted"] <= 8 and rows[struck]["rollout/failed_requests"] == 0
    samples = samples_of(directory)
    assert sum(r.agent == "solver" for r in samples) == last * 2 * 4
    assert len({r.uid for r in samples}) == len(samples)
    # The new engine decodes with its version's weights: the trainer computes the same probabilities, except for tokens whose
    # routers find two experts equally good.
    assert all(row["train_rollout/prob_diff_mean"] < 1e-5 for row in rows.values())
    assert all(row["actor/empty_steps"] == 0 for row in rows.values())
    assert "lost: restarted" in {span.name for span in read_trace(directory.trace) if span.lane == "engine/0"}
    latest = directory.latest_checkpoint()
    assert latest is not None and latest.step == last and damage(latest.path) == []
    said = failure_message(failure.value, directory, parent_of())
    assert f"step_{last} (step {last}) is intact: resume by adding run.name=scripted run.resume=auto" in said


@pytest.mark.slow
def test_a_moved_engine_decodes_with_its_new_policy_s_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(policies: Mapping[str, PolicyEngines]) -> Move | None:
        return Move("verifier", "solver", 1, "as the test wants it") if policies["solver"].engines == 1 else None

    monkeypatch.setattr(rebalance, "wanted", told)
    own = f"model: {init_model('tiny', 'bytes', tmp_path / 'model')}, dtype: float32, optimizer: {{lr: 0.005}}"
    settings = [
        "task=math", "orchestration=solver_verifier", f"policies={{solver: {{{own}}}, verifier: {{{own}, engines: 2}}}}",
        "agents={solver: {policy: solver}, verifier: {policy: verifier, prompt: chain}}", f"data.train={sevens(tmp_path)}",
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
        assert row["solver/sync/direct"] == 1 and row["rollout/engine_restarts"] == 0
        # The Verifier is only asked about solutions that ended, which a random model does by chance.
        for name in ("solver", *(["verifier"] if row.get("cost/verifier/output_tokens") else [])):
            assert row[f"cost/{name}/seconds"] == row[f"policy_cost/{name}/seconds"] > 0
        # The trainer computes the same probabilities, except for tokens whose routers find two experts equally good.
        assert row["solver/train_rollout/prob_diff_mean"] < 1e-5
