"""Several optimizer updates a step, and the KL term, compared with plain PyTorch that computes the definitions."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_models as tiny
import numpy as np
import pytest
import torch
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.trainer import build
from marsrl.trainer.config import MptConfig, OptimizerConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.mini_batches import Average
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.data.scatter import micro_batches as split
from marsrl.trainer.learner.learner import Learner

ALIKE = PolicyObjective(clip_low=0.05, clip_high=0.05)


def update(policy: Learner, samples: list[TrainSequence], average: Average | None = None) -> Update:
    """Return the update in several micro-batches."""
    found = tiny.averaged(samples, average or Average())
    return Update(tuple(split(found.sequences, policy.shard(64))), found.normaliser)


def close(weights: dict[str, Tensor], expected: dict[str, Tensor], steps: int) -> None:
    """Compare weights, and allow for AdamW's first steps, which are lr * sign(g).

    If the gradient g is only a rounding error, as for a key's bias, its sign is arbitrary, and weights may differ by such a step.
    """
    assert tiny.largest_difference(weights, expected) < 2.1 * steps * tiny.OPTIMIZER.lr
    names = [name for name in expected if not name.endswith("k_proj.bias")]
    assert max(float((weights[n] - expected[n]).abs().median()) for n in names) < (2e-7 if steps == 1 else 1e-6)
    off = sum(int(((weights[n] - expected[n]).abs() > (2e-4 if steps == 1 else 1e-4)).sum()) for n in names)
    assert off <= (0 if steps == 1 else 0.002) * sum(w.numel() for w in expected.values())


GATE = {"scope": "sample", "entropy": 3.972, "probability": 0.02}  # gates two of three positive samples
KL = replace(ALIKE, kl_coef=0.3)


@pytest.mark.parametrize(
    ("kind", "objective", "mpt", "average", "num_updates"),
    [
        ("qwen2", PolicyObjective(), {}, Average("sequence_sum_constant", "agent", 40), 1),
        ("qwen3", PolicyObjective(), GATE, Average("sequence", "agent"), 1),
        ("qwen3_moe", PolicyObjective(), {**GATE, "entropy": 3.98, "probability": 0.01}, Average(), 1),
        ("qwen2", PolicyObjective(), {**GATE, "temperature": 1}, Average("token", "agent"), 1),
        ("qwen3", replace(KL, kl="k1"), {}, Average(), 1),
        ("qwen3", replace(KL, kl="k2"), {}, Average(), 1),
        ("qwen3_moe", replace(KL, kl="k3"), {}, Average(), 1),
        ("qwen3_moe", ALIKE, {}, Average(), 3),  # later updates clip relative to the policy before the first
        # One objective per agent.
        ("qwen3", [replace(ALIKE, clip_low=0.3), replace(ALIKE, clip_high=0.4)], {}, Average(), 3),
    ],
)
def test_a_step_equals_plain_pytorch(
    kind: str, objective: Any, mpt: dict[str, Any], average: Average, num_updates: int, tmp_path: Path
) -> None:
    folder, reference = tiny.save_model(kind, tmp_path / "m"), tiny.save_model(kind, tmp_path / "r", seed=1)
    gate = MptConfig.model_validate(mpt or {"scope": "off"})
    samples = [replace(s, temperature=0.6 if gate.temperature == 1 else 1.0) for s in tiny.sequences(8 if mpt else 9)]
    parts = [samples[i::num_updates] for i in range(num_updates)]
    objectives = objective if isinstance(objective, list) else [objective] * 2
    has_kl = objectives[0].kl_coef > 0
    policy = tiny.learner(folder, objective=objectives, mpt=gate, reference_dir=reference if has_kl else None)
    updates = [update(policy, part, average) for part in parts]
    stats = policy.train_step(updates)
    plain = tiny.plain_step(folder, parts, objectives=objectives, mpt=gate, average=average, reference=reference)
    is_one = num_updates == 1
    assert stats.loss == pytest.approx(math.fsum(plain.losses) / num_updates, rel=3e-6, abs=5e-7 if is_one else 2e-5)
    assert stats.grad_norm == pytest.approx(math.fsum(plain.norms) / num_updates, rel=1e-5 if is_one else 1e-3)
    sums = {name: sum(values) for name, values in stats.agent_sums.items()}
    assert sums["masked_tokens"] == plain.masked and sums["tokens"] == tiny.num_trained(samples)
    assert (0 < plain.masked < tiny.num_trained(samples)) == (0 < stats.gated_samples <= 3) == bool(mpt)
    assert not has_kl or sums["kl"] == pytest.approx(plain.kl, rel=1e-5)
    assert (plain.clipped > 20) == (not is_one) and abs(sums["clipped_tokens"] - plain.clipped) <= 2
    num_micro_batches = sum(len(each.micro_batches) for each in updates)
    assert stats.num_updates == num_updates < num_micro_batches
    assert policy.num_steps == 1 and stats.lr == tiny.OPTIMIZER.lr  # the schedule counts steps, not updates
    close(tiny.weights(policy), plain.weights, num_updates)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_clip_inside_the_optimizer_equals_one_before_it(dtype: str, tmp_path: Path) -> None:
    """Optimizers clip inside their update on GPUs, and before it on CPUs. The last update is not clipped."""
    folder, samples, weights = tiny.save_model("qwen3_moe", tmp_path / "m"), tiny.sequences(6), []
    optimizer = tiny.OPTIMIZER.model_copy(update={"grad_clip": 0.1})
    for inside in (False, True):
        policy = tiny.learner(folder, dtype=dtype, optimizer=optimizer)
        policy.optimizer._clips_inside = inside
        for clip in (0.1, 0.1, 1e9):
            policy.optimizer._clip = clip
            assert policy.train_step([update(policy, samples)]).grad_norm > 0.1
        weights.append(tiny.weights(policy))
    # A bfloat16 weight may round to its neighbour.
    allowed = 1e-5 if dtype == "float32" else 2.0**-7
    assert tiny.largest_difference(*weights) <= allowed


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_reference_changes_the_step(kl: str, tmp_path: Path) -> None:
    folder, samples = tiny.save_model("qwen3", tmp_path / "m"), tiny.sequences(3)
    weights = []
    for seed in (1, 2):
        reference = tiny.save_model("qwen3", tmp_path / f"r{seed}", seed=seed)
        policy = tiny.learner(folder, objective=replace(KL, kl=kl), reference_dir=reference)  # type: ignore[arg-type]
        policy.train_step([update(policy, samples)])
        weights.append(tiny.weights(policy))
    assert tiny.largest_difference(*weights) > tiny.OPTIMIZER.lr


def test_a_kl_penalty_in_the_reward_lowers_advantages(tmp_path: Path) -> None:
    """A token's penalty is the sum of log-ratios (sampling weights to reference) from it on, minus a baseline.

    The baseline is the mean of such sums over the tokens of the agent's other samples.
    """
    folder, reference = tiny.save_model("qwen3", tmp_path / "m"), tiny.save_model("qwen3", tmp_path / "r", seed=1)
    samples, of_samples = tiny.sequences(5), []
    assert any(not s.is_sampled.all() for s in samples)
    with torch.no_grad():
        for s in samples:
            log_ratio = np.zeros(len(s.token_ids), np.float32)
            assert s.rollout_logprobs is not None
            of_reference = tiny.hf_logprobs(tiny.scoring_model(reference), s)[0].numpy()
            log_ratio[s.is_sampled] = s.rollout_logprobs[s.is_sampled] - of_reference
            of_samples.append(np.array([log_ratio[place:].sum() for place in range(len(log_ratio))], np.float64))
    penalised = []
    for s, own in zip(samples, of_samples, strict=True):
        others = [
            v[o.is_sampled] for o, v in zip(samples, of_samples, strict=True) if o.agent == s.agent and o is not s
        ]
        advantages = s.advantage - 0.3 * (own - np.concatenate(others).mean())
        penalised.append(replace(s, token_advantages=np.where(s.is_sampled, advantages, 0).astype(np.float32)))
    in_reward = {"objective": PolicyObjective(kl="k3"), "reference_dir": reference, "reward_kl_coef": 0.3}
    stats = []
    for part, options in ((samples, in_reward), (penalised, {}), (samples, {})):
        policy = tiny.learner(folder, **options)  # type: ignore[arg-type]
        stats.append(policy.train_step([update(policy, part)]))
    found, by_hand, without = stats
    assert found.loss == pytest.approx(by_hand.loss, rel=1e-5)
    assert found.grad_norm == pytest.approx(by_hand.grad_norm, rel=1e-5)
    assert without.grad_norm != pytest.approx(by_hand.grad_norm, rel=0.1)
    assert sum(found.agent_sums["kl"]) > 0 == sum(by_hand.agent_sums["kl"])  # still logged


@pytest.mark.parametrize(("kl_in", "coefs"), [("loss", (0.2, 0.0)), ("reward", (0.0, 0.2))])
def test_loss_kl_in_moves_the_kl_term(kl_in: str, coefs: tuple[float, float], tmp_path: Path) -> None:
    model = tiny.save_model("qwen3", tmp_path / "m")
    words = ["task=math", "data.train=x.jsonl", "loss.kl=k2", "loss.kl_coef=0.2", f"loss.kl_in={kl_in}"]
    words += [f"policies.main.{each}" for each in (f"model={model}", "reference=start", "dtype=float32")]
    passes = build._learner(read_config(None, words)[0], "main", str(model), None).passes
    assert {(each.kl, each.kl_coef, passes.reward_kl_coef) for each in passes.objectives} == {("k2", *coefs)}
    assert passes.reference is not None


def test_an_update_that_is_not_finite_is_skipped_and_counts(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3", tmp_path / "m")
    samples = tiny.sequences(6)
    bad = [replace(s, advantage=math.nan) for s in samples[3:]]
    policy, other = tiny.learner(folder, objective=ALIKE), tiny.learner(folder, objective=ALIKE)
    stats = policy.train_step([update(policy, samples[:3]), update(policy, bad)])
    assert stats.is_skipped and stats.is_updated and stats.num_updates == 1
    other.train_step([update(other, samples[:3])])
    assert tiny.largest_difference(tiny.weights(policy), tiny.weights(other)) == 0.0


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.7, 0.4, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.775, 0.325, 0.1, 0.1]),
    ],
)
def test_warm_up_then_decay_to_the_final_ratio(decay: str, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay=decay, final_lr_ratio=0.1)  # type: ignore[arg-type]
    assert [config.lr_at(step, 6) for step in range(7)] == pytest.approx(expected)
