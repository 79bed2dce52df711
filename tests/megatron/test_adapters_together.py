"""Adapters of one base in shared micro-batches: each steps as it would in micro-batches of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import learner, num_trained, on_one_base, save_model, sequences
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.learner.together import groups

POLICIES = ("a", "b", "a")  # of the agents 0, 1, 2
MOE = {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": ["attention", "experts"]}
ADAPTERS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {"a": {"rank": 8, "alpha": 16}, "b": {"rank": 4, "alpha": 2, "targets": ["attention"]}},
    "qwen3_moe": {"a": MOE, "b": {**MOE, "rank": 8}},
}
LR = {"a": 1e-2, "b": 3e-3}


def two(model: Path, kind: str, **settings: Any) -> dict[str, Learner]:
    """The policies on one base; their clipping bites."""
    optimizers = {name: {"lr": lr, "grad_clip": 0.05} for name, lr in LR.items()}
    return on_one_base(
        model, ADAPTERS[kind], optimizers, objective=[PolicyObjective(kl="k3", kl_coef=0.1)] * 3, **settings
    )


def batch(step: int) -> dict[str, list[TrainSequence]]:
    """Samples of each policy; the second step has none of `b`."""
    samples = sequences(9, seed=step, num_agents=3)
    found = {name: [s for s in samples if POLICIES[s.agent] == name] for name in LR}
    return found if step != 1 else {**found, "b": []}


def held(policy: Learner) -> dict[str, Tensor]:
    return dict(policy.held_adapter().export())


def update_of(samples: list[TrainSequence]) -> tuple[MiniBatch, ...]:
    return (MiniBatch(tuple(samples), num_trained(samples)),)


def together(learners: dict[str, Learner], step: int, max_tokens: int, **options: Any) -> dict[str, StepStats]:
    (group,) = groups(learners, POLICIES)
    parts = [update_of(own) for own in batch(step).values()]
    return group.train_step(scatter(joined(parts), group.shard(max_tokens)), **options)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_shared_micro_batches_train_each_policy_as_its_own(kind: str, recompute: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    shared, apart = two(model, kind, recompute=recompute), two(model, kind, recompute=recompute)
    uids = {s.uid for own in batch(0).values() for s in own}
    for step in range(3):
        before = held(shared["b"])
        found = together(shared, step, 64, by_agent=True, keep=uids)
        # a policy without a sample is not moved by its momentum
        assert all(torch.equal(t, before[name]) for name, t in held(shared["b"]).items()) == (step == 1)
        for name, policy in apart.items():
            updates = scatter(update_of(batch(step)[name]), policy.shard(64))
            alone, other = policy.train_step(updates, by_agent=True, keep=uids), found[name]
            assert (other.is_empty, other.is_updated, other.lr) == (alone.is_empty, alone.is_updated, alone.lr)
            assert other.loss == pytest.approx(alone.loss, abs=2e-6)
            assert other.grad_norm == pytest.approx(alone.grad_norm, rel=2e-4)
            assert other.prob_diff_mean == pytest.approx(alone.prob_diff_mean, rel=1e-4, nan_ok=True)
            for key, sums in alone.agent_sums.items():
                assert other.agent_sums[key] == pytest.approx(sums, rel=2e-4, abs=2e-5) or key == "loss"
            norms, expected = ([norm or 0.0 for norm in each.agent_grad_norms] for each in (other, alone))
            assert norms == pytest.approx(expected, rel=2e-4)
            assert {each.uid for each in other.tokens} == {each.uid for each in alone.tokens}
    for name in LR:
        mine, own = held(shared[name]), held(apart[name])
        assert max(float((mine[n] - own[n]).abs().max()) for n in own) < 5e-4
        assert any(bool(tensor.any()) for n, tensor in mine.items() if "lora_B" in n)


def test_one_policys_broken_sample_does_not_skip_the_other(tmp_path: Path) -> None:
    learners = two(save_model("qwen3", tmp_path / "model"), "qwen3")
    (group,) = groups(learners, POLICIES)
    own = batch(0)
    own["b"][0] = replace(own["b"][0], advantage=float("nan"))
    updates = scatter(joined([update_of(each) for each in own.values()]), group.shard(1024))
    assert len(updates[0].micro_batches) == 1
    found = group.train_step(updates)
    assert (found["a"].is_updated, found["a"].is_skipped) == (True, False)
    assert (found["b"].is_updated, found["b"].is_skipped) == (False, True)


def test_adapters_of_experts_have_micro_batches_of_their_own(tmp_path: Path) -> None:
    for kind, num in (("qwen3", 1), ("qwen3_moe", 2)):
        (group,) = groups(two(save_model(kind, tmp_path / kind), kind), POLICIES)
        updates = scatter(joined([update_of(each) for each in batch(0).values()]), group.shard(1024))
        policies = [{POLICIES[agent] for agent in each.agents} for each in updates[0].micro_batches]
        assert [len(each) for each in policies] == [2 // num] * num
        parallel.stop(keep_world=True)


def test_policies_with_weights_of_their_own_do_not_train_together(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    found = groups({"a": learner(model), "b": learner(model), "c": learner(model, adapter={})}, ("a", "b", "c"))
    assert [list(group.learners) for group in found] == [["a"], ["b"], ["c"]]
