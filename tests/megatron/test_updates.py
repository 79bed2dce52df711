"""Several optimizer updates a step, and the KL term: against plain PyTorch that does the same by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_models import (
    OPTIMIZER,
    largest_difference,
    micro_batches,
    num_trained,
    plain_step,
    save_model,
    sequences,
    step,
    weights,
)
from megatron_models import learner as new_learner
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.trainer.config import OptimizerConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.data.scatter import micro_batches as split
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import shim

ALIKE = PolicyObjective(clip_low=0.05, clip_high=0.05)


def learner(folder: Path, *, kl: Any = "none", kl_coef: float = 0.0, **changes: Any) -> Learner:
    return new_learner(folder, objective=replace(ALIKE, kl=kl, kl_coef=kl_coef), **changes)


def update(samples: list[TrainSequence], cuts: int = 1) -> Update:
    return Update(tuple(micro_batches(samples, cuts)), num_trained(samples))


def close(found: dict[str, Tensor], expected: dict[str, Tensor], steps: int) -> None:
    """AdamW's first steps are lr * sign(g): where g is at rounding, a weight may differ by that; the rest agree."""
    assert largest_difference(found, expected) < 2.1 * steps * OPTIMIZER.lr
    assert max(float((found[n] - expected[n]).abs().median()) for n in expected) < 1e-6
    off = sum(int(((found[n] - expected[n]).abs() > 1e-4).sum()) for n in expected)
    assert off < 0.002 * sum(w.numel() for w in expected.values())


def test_each_agent_has_its_own_clip_range(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path / "m")
    samples = sequences(9)
    objectives = [replace(ALIKE, clip_low=0.3), replace(ALIKE, clip_high=0.4)]  # of agent 0 and agent 1
    parts = [samples[i::3] for i in range(3)]
    policy = new_learner(folder, objective=objectives)
    shard = policy.shard(64)
    updates = [Update(tuple(split(part, shard)), num_trained(part)) for part in parts]
    agents = [[set(batch.agent_of.tolist()) for batch in each.micro_batches] for each in updates]
    assert all({0} in each and {1} in each and {0, 1} not in each for each in agents)
    stats = policy.train_step(updates)
    plain = plain_step(folder, parts, objectives=objectives)
    clipped_alike = plain_step(folder, parts, objectives=[ALIKE] * 2).clipped
    assert stats.loss == pytest.approx(math.fsum(plain.losses) / 3, abs=2e-5)
    assert stats.grad_norm == pytest.approx(math.fsum(plain.norms) / 3, rel=1e-3)
    assert abs(sum(stats.agent_sums["clipped_tokens"]) - plain.clipped) <= 2 < abs(plain.clipped - clipped_alike)
    close(weights(policy), plain.weights, 3)


def test_three_updates_clip_against_the_policy_before_the_first(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    samples = sequences(9)
    parts = [samples[i::3] for i in range(3)]
    policy = learner(folder)
    stats = policy.train_step([update(part, 2) for part in parts])
    plain = plain_step(folder, parts, objectives=[ALIKE] * 2)
    assert stats.loss == pytest.approx(math.fsum(plain.losses) / 3, abs=2e-5)
    assert stats.grad_norm == pytest.approx(math.fsum(plain.norms) / 3, rel=1e-3)
    assert plain.clipped > 20 and abs(sum(stats.agent_sums["clipped_tokens"]) - plain.clipped) <= 2
    assert sum(stats.agent_sums["tokens"]) == num_trained(samples)
    assert stats.num_updates == 3 and len(stats.logprobs) == 6
    assert policy.num_steps == 1 and stats.lr == OPTIMIZER.lr  # the schedule counts steps, not updates
    close(weights(policy), plain.weights, 3)


def test_an_update_that_is_not_finite_is_skipped_and_counts(tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path / "m")
    samples = sequences(6)
    bad = [replace(s, advantage=math.nan) for s in samples[3:]]
    policy, other = learner(folder), learner(folder)
    stats = policy.train_step([update(samples[:3]), update(bad)])
    assert stats.is_skipped and stats.is_updated and stats.num_updates == 1
    step(other, micro_batches(samples[:3], 1), normaliser=num_trained(samples[:3]))
    assert largest_difference(weights(policy), weights(other)) == 0.0


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_a_kl_step_equals_plain_pytorch(kl: str, tmp_path: Path) -> None:
    kind = "qwen3_moe" if kl == "k3" else "qwen3"
    folder, reference = save_model(kind, tmp_path / "m"), save_model(kind, tmp_path / "r", seed=1)
    samples = sequences(6)
    policy = learner(folder, kl=kl, kl_coef=0.3, reference_dir=reference)
    stats = policy.train_step([update(samples, 2)])
    objectives = [replace(ALIKE, kl=kl, kl_coef=0.3)] * 2  # type: ignore[arg-type]
    plain = plain_step(folder, [samples], objectives=objectives, reference=reference)
    assert stats.loss == pytest.approx(plain.losses[0], rel=3e-6)
    assert stats.grad_norm == pytest.approx(plain.norms[0], rel=1e-5)
    assert sum(stats.agent_sums["kl"]) == pytest.approx(plain.kl, rel=1e-5)
    close(weights(policy), plain.weights, 1)


def test_kl_to_the_start_is_zero_at_first_and_then_pulls_back(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    samples = sequences(6)
    one = learner(folder, kl="k3", kl_coef=0.3, reference_dir=folder, dtype="bfloat16")
    first = one.train_step([update(samples)])
    second = one.train_step([update(samples)])
    assert sum(first.agent_sums["kl"]) == 0.0 < sum(second.agent_sums["kl"])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1]),
    ],
)
def test_warm_up_then_decay_to_the_final_ratio(decay: str, expected: list[float]) -> None:
    shim.install()
    from marsrl.trainer.learner.megatron.optimizer import lr_at

    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay=decay, final_lr_ratio=0.1)  # type: ignore[arg-type]
    assert [lr_at(step, 6, config) for step in range(7)] == pytest.approx(expected)
