"""agents.<name>.teacher: the log-probs of a frozen policy train an agent token by token, alone or together with the reward."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from desk import Desk, boxing_model
from documented_commands import run_by
from scripted_pool import rows_of, train_here
from small_run import run_here, sevens

from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import init_model
from marsrl.trainer.report.metrics import read_metrics

SETTINGS = (
    "task=math", "orchestration=solver", "data.train=problems.jsonl", "policies.main.dtype=float32",
    "policies.main.optimizer.lr=5e-3", "rollout.engine=local", "rollout.placement=local", "rollout.prompts_per_step=8",
    "rollout.group_size=8", "rollout.max_response_tokens=24", "run.evaluate=false", "mpt.scope=off",
    "policies.big.frozen=true", "policies.big.dtype=float32", "agents.solver.teacher.policy=big",
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Return settings of a run: the Solver answers 7 or 8 at random and is rewarded for 8, its teacher answers 7."""
    os.chdir(tmp_path)
    sevens(tmp_path, name="problems.jsonl", answer="8")
    coin, big = boxing_model(tmp_path / "coin"), boxing_model(tmp_path / "big", "7")
    return [*SETTINGS, f"policies.main.model={coin}", f"policies.big.model={big}"]


@pytest.mark.slow
def test_a_teacher_alone_is_followed_whatever_the_reward_says(words: list[str], tmp_path: Path) -> None:
    """Samples have segments of several versions, and training forces the experts that the engine recorded."""
    words += ["rollout.segments=3", "rollout.segment_length=8", "rollout.overlap=1", "rollout.engines=2"]
    words += ["trainer.router_replay=rollout"]
    rows = rows_of(train_here(tmp_path, [*words, "agents.solver.loss_weight=0", "run.steps=14"]))
    rows = [row for row in rows if "teacher/solver/kl" in row]  # steps in which groups have ended
    kl, rewards = ([row[name] for row in rows] for name in ("teacher/solver/kl", "reward/solver/mean"))
    # Half of the answers have one token of about ten to which the teacher gives probability e^-16.
    assert rewards[0] > 0.2 and kl[0] > 0.4
    assert rewards[-1] < rewards[0] / 3
    assert all(row["actor/updates"] == 1 and row["mpt/gated_samples"] == 0 for row in rows)
    # For some tokens, the current weights would choose other experts than the recorded ones.
    assert 0 < sum(row["router/replayed_differ"] for row in rows) < len(rows) / 2
    assert all(row["train_rollout/prob_diff_mean"] < 0.05 for row in rows)


@pytest.mark.slow
def test_beside_a_teacher_the_reward_counts(words: list[str], tmp_path: Path) -> None:
    """RL makes an agent better: its answers are random at first, and later more often the rewarded one. The teacher, which gives
    the other answer, has a small weight.
    """
    rows = rows_of(
        train_here(tmp_path, [*words, "agents.solver.teacher.coef=1e-3", "rollout.prompts_per_step=16", "run.steps=8"])
    )
    first, last = (row["reward/solver/mean"] for row in (rows[0], rows[-1]))
    # By Hoeffding's inequality, the mean of a step's samples deviates by more than this once in 10^9 steps.
    far = math.sqrt(math.log(2e9) / 2 / 128)
    assert abs(first - 0.5) < far < 0.3 and last > 0.5 + far
    assert rows[-1]["teacher/solver/kl"] > rows[0]["teacher/solver/kl"]


@pytest.mark.slow
@pytest.mark.smoke
def test_a_student_equal_to_its_teacher_learns_nothing(words: list[str], tmp_path: Path) -> None:
    same = [f"policies.big.model={tmp_path / 'coin'}", "agents.solver.temperature=0.6"]
    few = ["agents.solver.loss_weight=0", "rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=1"]
    (row,) = rows_of(train_here(tmp_path, [*words, *same, *few]))
    assert row["actor/tokens"] > 0 and abs(row["teacher/solver/kl"]) < 1e-5 and row["actor/grad_norm"] < 1e-5


@pytest.mark.slow
@pytest.mark.smoke
def test_teachers_share_the_tokenizer_and_load_only_in_training(words: list[str], tmp_path: Path) -> None:
    other = init_model("tiny", "arithmetic", tmp_path / "other")
    with pytest.raises(ValueError, match=r"its tokenizer differs from that of policies\.main"):
        preflight(read_config(None, [*words, f"policies.big.model={other}"])[0], world_size=1)
    config = preflight(read_config(None, words, trains=False)[0], world_size=1, trains=False).config
    assert list(config.policies) == ["main"] and config.agents["solver"].teacher is None


@pytest.mark.slow
@pytest.mark.parametrize("command", run_by("test_the_teacher_examples_train_a_small_solver"))
def test_the_teacher_examples_train_a_small_solver(command: str, tmp_path: Path) -> None:
    """Both examples run from untrained models, and the teacher scores the Solver's samples in each step."""
    desk = Desk(tmp_path)
    os.chdir(tmp_path)
    models = [f"policies.solver.model={init_model('tiny', 'arithmetic', tmp_path / 'student')}"]
    if is_taught := "run.yaml" in command:
        models.append(f"policies.big.model={init_model('cpu_default', 'arithmetic', tmp_path / 'teacher')}")
    small = ["policies.solver.shape=null", "run.steps=2", "run.evaluate=false", "run.eval_every=0"]
    run_here([*desk.words(command, Path)[2:], *models, *small])
    rows = [row.values for path in Path("runs").glob("*/metrics.jsonl") for row in read_metrics(path)]
    assert len(rows) == 2
    assert all(((row.get("teacher/solver/kl") or 0) > 0) == is_taught for row in rows)
    assert not is_taught or all(row["actor/updates"] == 1 for row in rows)
