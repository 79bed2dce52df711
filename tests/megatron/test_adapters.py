"""Training, checkpoints and exports of adapters on a frozen base, on one rank.

Log-probs are compared with PEFT's, and with those of a transformers model that has W + s B A in place of W. Adapters of one base
train in shared micro-batches as they do in separate ones.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_models as tiny
import numpy as np
import pytest
import torch
from torch import Tensor

from marsrl.commands.models.export import export
from marsrl.kernels import PolicyObjective
from marsrl.rollout.adapter import AdapterConfig, read_tensors, tensor_shapes
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch, joined, scatter
from marsrl.trainer.learner.learner import Learner, groups
from marsrl.trainer.learner.other_roundings import Precision
from marsrl.trainer.weights.comparison import comparison_sequences, scores_together, sequence_scores

pytestmark = pytest.mark.slow

ADAPTERS: dict[str, dict[str, Any]] = {
    "qwen3": {"rank": 8, "alpha": 16},
    "qwen3_moe": {"rank": 8, "expert_rank": 2, "alpha": 16, "targets": ["attention", "experts"]},
}


def peft_directory(model: Path, folder: Path, settings: dict[str, Any]) -> str:
    return str(tiny.save_adapter(model, folder, AdapterConfig.model_validate(settings)))


def adapted(model: Path, kind: str, start: str | None = None, **settings: Any) -> Learner:
    return tiny.learner(model, adapter={**ADAPTERS[kind], "start": start}, **settings)


def trained(policy: Learner, num_steps: int = 2, seed: int = 0) -> list[float]:
    samples, found = tiny.sequences(6, seed=seed), []
    for _ in range(num_steps):
        stats = tiny.step(policy, tiny.micro_batches(samples, 2))
        found += [stats.loss, stats.grad_norm]
    return found


def logprobs_of(model: Path, samples: list[TrainSequence], adapter: Path | None = None) -> Tensor:
    """Return the sampled tokens' log-probs, computed by transformers, and by PEFT if there is an adapter."""
    judge = tiny.scoring_model(model, adapter)
    with torch.no_grad():
        return torch.cat([tiny.hf_logprobs(judge, sample)[0] for sample in samples])


def scored(policy: Learner, samples: list[TrainSequence]) -> Tensor:
    (batch,) = tiny.micro_batches(samples, 1)
    return policy.score([batch])[0][batch.mask]


@pytest.mark.parametrize("kind", ADAPTERS)
def test_only_the_adapter_trains_and_its_export_is_bitwise_equal(kind: str, tmp_path: Path) -> None:
    model = tiny.save_model(kind, tmp_path / "model")
    policy = adapted(model, kind)
    assert policy.adapter is not None
    shape, settings = read_shape(model), policy.adapter.settings
    base, before = (
        {name: parameter.clone() for name, parameter in policy.model.named_parameters()},
        tiny.weights(policy),
    )
    assert {name: tuple(tensor.shape) for name, tensor in before.items()} == tensor_shapes(shape, settings)
    assert all(bool(tensor.any()) == name.endswith("lora_A.weight") for name, tensor in before.items())
    trained(policy)
    after = tiny.weights(policy)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(parameter, base[name]) for name, parameter in policy.model.named_parameters())
    tiny.save(policy, tmp_path / "saved")
    index = json.loads((tmp_path / "saved" / "index.json").read_text("utf-8"))
    stored = {name for name in index["tensors"] if name.startswith("decoder.layers.")}
    # Tensors have Megatron's names, so that checkpoints of earlier versions can be read.
    states = {f"optimizer.state.{key}.{name}" for key in ("param", "exp_avg", "exp_avg_sq") for name in stored}
    assert all("lora_" in name for name in stored) and index["tensors"].keys() == stored | states
    export(tmp_path / "saved", tmp_path / "peft")
    for tensors in (read_tensors(tmp_path / "peft"), tiny.weights(adapted(model, kind, str(tmp_path / "peft")))):
        assert tiny.largest_difference(tensors, after) == 0
    again = adapted(model, kind)
    again.load(tmp_path / "saved")
    assert trained(again, seed=1) == trained(policy, seed=1)
    assert tiny.largest_difference(tiny.weights(again), tiny.weights(policy)) == 0


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_and_transformers_score_an_export_as_the_learner(kind: str, merge: bool, tmp_path: Path) -> None:
    """PEFT scores the adapter, transformers the merged model."""
    model = tiny.save_model(kind, tmp_path / "model")
    policy = adapted(model, kind, peft_directory(model, tmp_path / "start", ADAPTERS[kind]))
    trained(policy)
    tiny.save(policy, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "out", merge=merge)
    samples = tiny.sequences(4, seed=3)
    found = scored(policy, samples)
    judge = (tmp_path / "out", samples) if merge else (model, samples, tmp_path / "out")
    torch.testing.assert_close(found, logprobs_of(*judge), atol=2e-5, rtol=0)
    assert (found - logprobs_of(model, samples)).abs().max() > 0.1


def test_a_checkpoint_of_another_base_or_kind_is_refused(tmp_path: Path) -> None:
    model, other = tiny.save_model("qwen3", tmp_path / "model"), tiny.save_model("qwen3", tmp_path / "other", seed=1)
    tiny.save(adapted(model, "qwen3"), tmp_path / "saved")
    with pytest.raises(ValueError, match="adapter of the weights in .*model, but those in .*other differ"):
        adapted(other, "qwen3").load(tmp_path / "saved")
    with pytest.raises(ValueError, match="holds an adapter, but this policy trains whole weights"):
        tiny.learner(model).load(tmp_path / "saved")


@pytest.mark.parametrize("start", [False, True], ids=["the bare base", "the adapter of the start"])
def test_the_reference_of_an_adapter_is_what_it_starts_from(start: bool, tmp_path: Path) -> None:
    model = tiny.save_model("qwen3", tmp_path / "model")
    folder = peft_directory(model, tmp_path / "start", ADAPTERS["qwen3"]) if start else None
    policy = adapted(model, "qwen3", folder, objective=PolicyObjective(kl="k3", kl_coef=0.1))
    samples = tiny.sequences(6)
    sums = [tiny.step(policy, tiny.micro_batches(samples, 2)).agent_sums["kl"] for _ in range(2)]
    assert sum(sums[0]) == pytest.approx(0.0, abs=1e-6)
    assert sum(sums[1]) > 1e-4


def test_policies_with_separate_weights_train_as_if_alone(tmp_path: Path) -> None:
    model = tiny.save_model("qwen3_moe", tmp_path / "model")

    def new(lr: float) -> Learner:
        optimizer = tiny.OPTIMIZER.model_copy(update={"lr": lr})
        options = {"reference_dir": model, "router_replay": "recompute", "optimizer": optimizer}
        return tiny.learner(model, objective=PolicyObjective(kl="k3", kl_coef=0.1), **options)

    rates = (1e-2, 3e-3)
    both = [new(lr) for lr in rates]
    found = [trained(policy, 1, seed) for _ in range(2) for seed, policy in enumerate(both)]
    for seed, policy in enumerate(both):
        alone = new(rates[seed])
        assert [trained(alone, 1, seed) for _ in range(2)] == found[seed::2]
        assert tiny.largest_difference(tiny.weights(alone), tiny.weights(policy)) == 0
    learners = {"a": both[0], "b": both[1], "c": tiny.learner(model, adapter={})}
    assert [list(group.learners) for group in groups(learners, tuple("abc"))] == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("qwen3", {"targets": ["experts"]}, "adapter.targets includes experts, but .* has none; set mlp"),
        ("qwen3_moe", {"targets": ["mlp"]}, "adapter.targets is mlp only, but .* has experts instead"),
        ("qwen3", {"rank": 8, "alpha": 8}, "alpha / rank of .* is 2; expected .* = 1: set adapter.alpha=16"),
        (
            "qwen3",
            {"rank": 4, "alpha": 8},
            r"lora_A.weight has shape \[8, 32\]; this policy expects \[4, 32\]: set adapter.rank=8",
        ),
        ("qwen3", {"targets": ["attention"], "start": "elsewhere"}, "elsewhere, which lacks adapter_config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = tiny.save_model(kind, tmp_path / "model")
    start = peft_directory(model, tmp_path / "start", ADAPTERS[kind]) if "rank" in settings else None
    with pytest.raises(ValueError, match=reason):
        tiny.learner(model, adapter={**ADAPTERS[kind], "start": start, **settings})


def test_an_adapter_shared_by_experts_can_start_once_split(tmp_path: Path) -> None:
    """PEFT with transformers 5 writes adapters whose experts share one pair; `marsrl export` splits it by expert."""
    import peft

    model, kind = tiny.save_model("qwen3_moe", tmp_path / "model"), "qwen3_moe"
    settings = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"gate_up_proj": 2, "down_proj": 2},
        alpha_pattern={"gate_up_proj": 4, "down_proj": 4},
    )
    judge = peft.get_peft_model(tiny.scoring_model(model), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in judge.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    judge.save_pretrained(tmp_path / "fused")
    with pytest.raises(
        ValueError, match="one pair for all experts of a layer .*start from the output of `marsrl export .*fused NEW`"
    ):
        adapted(model, kind, str(tmp_path / "fused"))
    export(tmp_path / "fused", tmp_path / "split")
    policy = adapted(model, kind, str(tmp_path / "split"))
    (sample,) = tiny.sequences(1, seed=5)
    with torch.no_grad():
        torch.testing.assert_close(scored(policy, [sample]), tiny.hf_logprobs(judge, sample)[0], atol=2e-5, rtol=0)


POLICIES = ("a", "b", "a")  # policies of agents 0, 1 and 2
MOE = {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": ["attention", "experts"]}
PAIRS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3": {"a": {"rank": 8, "alpha": 16}, "b": {"rank": 4, "alpha": 2, "targets": ["attention"]}},
    "qwen3_moe": {"a": MOE, "b": {**MOE, "rank": 8}},
}
LR = {"a": 1e-2, "b": 3e-3}


def two(model: Path, kind: str, **settings: Any) -> dict[str, Learner]:
    """Build the policies on one base; their gradients are clipped."""
    optimizers = {name: {"lr": lr, "grad_clip": 0.05} for name, lr in LR.items()}
    return tiny.on_one_base(
        model, PAIRS[kind], optimizers, objective=[PolicyObjective(kl="k3", kl_coef=0.1)] * 3, **settings
    )


def batch(number: int) -> dict[str, list[TrainSequence]]:
    """Return samples of each policy; the second step has none of `b`."""
    samples = tiny.sequences(9, seed=number, num_agents=3)
    found = {name: [s for s in samples if POLICIES[s.agent] == name] for name in LR}
    return found if number != 1 else {**found, "b": []}


def update_of(samples: list[TrainSequence]) -> tuple[MiniBatch, ...]:
    return (MiniBatch(tuple(samples), tiny.num_trained(samples)),)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("kind", PAIRS)
def test_shared_micro_batches_train_each_policy_as_its_own(kind: str, recompute: str, tmp_path: Path) -> None:
    """Adapters share micro-batches, except if they adapt experts."""
    model = tiny.save_model(kind, tmp_path / "model")
    shared, apart = two(model, kind, recompute=recompute), two(model, kind, recompute=recompute)
    uids = {s.uid for own in batch(0).values() for s in own}
    (group,) = groups(shared, POLICIES)
    for number in range(3):
        before, joint = tiny.weights(shared["b"]), joined([update_of(own) for own in batch(number).values()])
        (update,) = scatter(joint, group.shard(64))
        num_policies = max(len({POLICIES[agent] for agent in each.agents}) for each in update.micro_batches)
        assert num_policies == (2 if kind == "qwen3" and number != 1 else 1)
        stats = group.train_step([update], by_agent=True, keep=uids)
        # A policy without samples is not moved by its momentum.
        assert (tiny.largest_difference(tiny.weights(shared["b"]), before) == 0) == (number == 1)
        for name, policy in apart.items():
            updates = scatter(update_of(batch(number)[name]), policy.shard(64))
            alone, other = policy.train_step(updates, by_agent=True, keep=uids), stats[name]
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
        weights = tiny.weights(shared[name])
        assert tiny.largest_difference(weights, tiny.weights(apart[name])) < 5e-4
        assert any(bool(tensor.any()) for n, tensor in weights.items() if "lora_B" in n)


@pytest.mark.parametrize("kind", PAIRS)
def test_another_number_of_adapters_trains_each_as_before(kind: str, tmp_path: Path) -> None:
    """An adapter of a larger rank and with other targets is added, and an adapter is removed."""
    model = tiny.save_model(kind, tmp_path / "model")
    more = {"rank": 12, "alpha": 12, "targets": ["attention"]}

    def third_step(names: str, learners: dict[str, Learner]) -> dict[str, Learner]:
        for name in names:
            learners[name].load(tmp_path / name)
        (group,) = groups(learners, POLICIES)
        parts = [update_of(batch(2).get(name, [])) for name in learners]
        group.train_step(scatter(joined(parts), group.shard(64)))
        return learners

    saved = two(model, kind)
    (group,) = groups(saved, POLICIES)
    for number in range(2):
        group.train_step(scatter(joined([update_of(own) for own in batch(number).values()]), group.shard(64)))
    for name, policy in saved.items():
        tiny.save(policy, tmp_path / name)
    expected = third_step("ab", two(model, kind))
    settings = {**PAIRS[kind], "c": more}
    optimizers = {name: {"lr": LR.get(name, 1e-2), "grad_clip": 0.05} for name in settings}
    objective = [PolicyObjective(kl="k3", kl_coef=0.1)] * 3

    def built(names: str) -> dict[str, Learner]:
        own = {name: settings[name] for name in names}
        return tiny.on_one_base(model, own, optimizers, objective=objective)

    three, one = third_step("ab", built("abc")), third_step("a", built("a"))
    for name in "ab":
        assert tiny.largest_difference(tiny.weights(three[name]), tiny.weights(expected[name])) < 1e-6
    assert not any(tensor.any() for name, tensor in tiny.weights(three["c"]).items() if "lora_B" in name)
    assert tiny.largest_difference(tiny.weights(one["a"]), tiny.weights(expected["a"])) < 1e-4
    assert tiny.largest_difference(tiny.weights(one["a"]), tiny.weights(saved["a"])) > 1e-3


def test_adapters_are_joined_once_at_the_first_use(tmp_path: Path) -> None:
    folder, names = tiny.save_model("qwen3", tmp_path / "m"), ("a", "b", "c")
    learners = tiny.on_one_base(folder, {name: {} for name in names}, dict.fromkeys(names, tiny.OPTIMIZER))
    base = learners["a"].base
    assert base is not None and base.optimizer is None and not base.trained.buffers
    for learner in learners.values():
        learner.allocate()
    optimizer = base.optimizer
    tiny.save(learners["a"], tmp_path / "saved")
    learners["b"].load(tmp_path / "saved")  # as a run that resumes, before the first step
    trained(learners["c"])
    assert base.optimizer is optimizer and len(base.trained.buffers[False].weights) == 3
    with pytest.raises(AssertionError, match="before the bank is used"):
        tiny.learner(folder, adapter={}, base=base)


def test_one_policys_broken_sample_does_not_skip_the_other(tmp_path: Path) -> None:
    learners = two(tiny.save_model("qwen3", tmp_path / "model"), "qwen3")
    (group,) = groups(learners, POLICIES)
    samples = batch(0)
    samples["b"][0] = replace(samples["b"][0], advantage=float("nan"))
    updates = scatter(joined([update_of(each) for each in samples.values()]), group.shard(1024))
    assert len(updates[0].micro_batches) == 1
    found = group.train_step(updates)
    assert (found["a"].is_updated, found["a"].is_skipped) == (True, False)
    assert (found["b"].is_updated, found["b"].is_skipped) == (False, True)


@pytest.mark.parametrize("kind", PAIRS)
def test_policies_score_a_probe_together_as_each_alone(kind: str, tmp_path: Path) -> None:
    learners = two(tiny.save_model(kind, tmp_path / "model"), kind)
    (group,) = groups(learners, POLICIES)
    for number, own in enumerate(batch(0).values()):
        tiny.step(list(learners.values())[number], tiny.micro_batches([replace(s, agent=0) for s in own], 1))
    precision, sequences = Precision(torch.float32), comparison_sequences(learners["a"].vocab_size)[:4]
    found = scores_together(group, learners, precision)
    assert not np.allclose(found["a"].logprobs, found["b"].logprobs, atol=1e-4)
    for name, learner in learners.items():
        np.testing.assert_allclose(found[name].logprobs, sequence_scores(learner, sequences), atol=2e-5)
        assert 0 < np.abs(np.subtract(found[name].rounded, found[name].logprobs)).max() < 1e-3
