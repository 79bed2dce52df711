"""Adapters on a frozen base, on one rank: against transformers' model with W + s B A in place of W, checkpoints, exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import (
    OPTIMIZER,
    hf_logprobs,
    learner,
    micro_batches,
    num_trained,
    save,
    save_model,
    sequences,
    step,
)
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.rollout.adapter import AdapterConfig, read_tensors, tensor_shapes, write_adapter
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.models.export import export

ADAPTERS: dict[str, dict[str, Any]] = {
    "qwen3": {"rank": 8, "alpha": 16},
    "qwen3_moe": {"rank": 8, "expert_rank": 2, "alpha": 16, "targets": ["attention", "experts"]},
}


@pytest.fixture(autouse=True)
def _one_layout() -> Iterator[None]:
    yield
    parallel.stop(keep_world=True)


def peft_directory(model: Path, folder: Path, settings: dict[str, Any], seed: int = 0) -> str:
    """A PEFT directory with random A and B."""
    shape, adapter = read_shape(model), AdapterConfig.model_validate(settings)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: 0.1 * torch.randn(size, generator=generator) for n, size in tensor_shapes(shape, adapter).items()}
    folder.mkdir(parents=True)
    write_adapter(folder, shape, adapter, tensors, str(model))
    return str(folder)


def adapted(model: Path, kind: str, start: str | None = None, **settings: Any) -> Learner:
    return learner(model, adapter={**ADAPTERS[kind], "start": start}, **settings)


def held(policy: Learner) -> dict[str, Tensor]:
    return dict(policy.held_adapter().export())


def base_of(policy: Learner) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in policy.model.named_parameters()}


def trained(policy: Learner, num_steps: int = 2, seed: int = 0) -> list[float]:
    samples, found = sequences(6, seed=seed), []
    for _ in range(num_steps):
        stats = step(policy, micro_batches(samples, 2), num_trained(samples))
        found += [stats.loss, stats.grad_norm]
    return found


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_step_moves_the_adapter_and_leaves_the_base_bit_for_bit(kind: str, tmp_path: Path) -> None:
    policy = adapted(save_model(kind, tmp_path / "model"), kind)
    shape, settings = policy.held_adapter().shape, policy.held_adapter().adapter
    weights, before = base_of(policy), held(policy)
    assert {name: tuple(tensor.shape) for name, tensor in before.items()} == tensor_shapes(shape, settings)
    assert all(bool(tensor.any()) == name.endswith("lora_A.weight") for name, tensor in before.items())
    trained(policy)
    after = held(policy)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.model.named_parameters())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_export_scores_as_the_adapter_on_its_base(kind: str, tmp_path: Path) -> None:
    import transformers

    model = save_model(kind, tmp_path / "model")
    policy = adapted(model, kind, peft_directory(model, tmp_path / "start", ADAPTERS[kind]))
    trained(policy)
    save(policy, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "whole", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    samples = sequences(4, seed=3)
    (batch,) = micro_batches(samples, 1)
    (found,) = policy.score([batch])
    with torch.no_grad():
        expected = torch.cat([hf_logprobs(merged, sample)[0] for sample in samples])
    torch.testing.assert_close(found[batch.mask], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_exported_adapter_is_what_was_held_and_is_taken_up_again(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    policy = adapted(model, kind)
    trained(policy)
    save(policy, tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "peft")
    own, files = held(policy), read_tensors(tmp_path / "peft")
    assert own.keys() == files.keys() and all(torch.equal(own[name], files[name]) for name in own)
    again = adapted(model, kind, str(tmp_path / "peft"))
    assert all(torch.equal(tensor, own[name]) for name, tensor in held(again).items())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_resumed_adapter_trains_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    policy = adapted(model, kind)
    trained(policy)
    save(policy, tmp_path / "saved")
    expected, last = trained(policy, seed=1), held(policy)
    again = adapted(model, kind)
    again.load(tmp_path / "saved")
    assert trained(again, seed=1) == expected
    assert all(torch.equal(tensor, last[name]) for name, tensor in held(again).items())
    index = json.loads((tmp_path / "saved" / "index.json").read_text("utf-8"))
    assert all("lora_" in name for name in index["tensors"])


def test_a_checkpoint_of_another_base_or_kind_is_refused(tmp_path: Path) -> None:
    model, other = save_model("qwen3", tmp_path / "model"), save_model("qwen3", tmp_path / "other", seed=1)
    save(adapted(model, "qwen3"), tmp_path / "saved")
    with pytest.raises(
        ValueError, match="adapter of the weights that were in .*model, and those in .*other are others"
    ):
        adapted(other, "qwen3").load(tmp_path / "saved")
    with pytest.raises(ValueError, match="holds an adapter, not what is trained"):
        learner(model).load(tmp_path / "saved")


@pytest.mark.parametrize("start", [False, True], ids=["the bare base", "the adapter of the start"])
def test_the_reference_of_an_adapter_is_what_it_starts_from(start: bool, tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    folder = peft_directory(model, tmp_path / "start", ADAPTERS["qwen3"]) if start else None
    policy = adapted(model, "qwen3", folder, objective=PolicyObjective(kl="k3", kl_coef=0.1))
    samples = sequences(6)
    sums = [step(policy, micro_batches(samples, 2), num_trained(samples)).agent_sums["kl"] for _ in range(2)]
    assert sum(sums[0]) == pytest.approx(0.0, abs=1e-6)
    assert sum(sums[1]) > 1e-4


def test_adapters_that_share_a_base_train_as_alone(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "model")
    first = adapted(model, "qwen3")
    second = adapted(model, "qwen3", base=first.base, optimizer=OPTIMIZER.model_copy(update={"lr": 3e-3}))
    assert second.model is first.model
    together = [(trained(policy, seed=seed), held(policy)) for seed, policy in enumerate((first, second))]
    for seed, lr in enumerate((OPTIMIZER.lr, 3e-3)):
        alone = adapted(model, "qwen3", optimizer=OPTIMIZER.model_copy(update={"lr": lr}))
        assert trained(alone, seed=seed) == together[seed][0]
        assert all(torch.equal(tensor, together[seed][1][name]) for name, tensor in held(alone).items())


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("qwen3", {"targets": ["experts"]}, "adapter.targets names experts, and .* has none: name mlp"),
        ("qwen3_moe", {"targets": ["mlp"]}, "adapter.targets names mlp alone, and .* has experts in its place"),
        ("qwen3", {"rank": 4}, "made with alpha / rank = 2; here adapter.alpha / adapter.rank is 4"),
        (
            "qwen3",
            {"rank": 4, "alpha": 8},
            r"q_proj.lora_A.weight has shape \[8, 32\], this policy's adapter gives \[4, 32\]",
        ),
        ("qwen3", {"targets": ["attention"], "start": "elsewhere"}, "elsewhere, which has no adapter_config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    kind: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = save_model(kind, tmp_path / "model")
    start = peft_directory(model, tmp_path / "start", ADAPTERS[kind]) if "rank" in settings else None
    with pytest.raises(ValueError, match=reason):
        learner(model, adapter={**ADAPTERS[kind], "start": start, **settings})


def test_peft_scores_an_exported_adapter_as_the_learner_that_trained_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    for kind in ADAPTERS:
        model = save_model(kind, tmp_path / kind)
        policy = adapted(model, kind, peft_directory(model, tmp_path / "start" / kind, ADAPTERS[kind]))
        trained(policy)
        save(policy, tmp_path / "saved" / kind)
        export(tmp_path / "saved" / kind, tmp_path / "peft" / kind)
        model_of_hf = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        (sample,) = sequences(1, seed=5)
        (batch,) = micro_batches([sample], 1)
        (found,) = policy.score([batch])
        with torch.no_grad():
            bare = hf_logprobs(model_of_hf, sample)[0]
            judge = peft.PeftModel.from_pretrained(model_of_hf, tmp_path / "peft" / kind)
            torch.testing.assert_close(found[batch.mask], hf_logprobs(judge, sample)[0], atol=2e-5, rtol=0)
        assert (found[batch.mask] - bare).abs().max() > 0.1
        parallel.stop(keep_world=True)


def test_an_adapter_with_one_pair_for_all_experts_is_started_from_once_it_is_split(tmp_path: Path) -> None:
    """PEFT with transformers 5 writes such ones."""
    peft = pytest.importorskip("peft")
    import transformers

    model, kind = save_model("qwen3_moe", tmp_path / "model"), "qwen3_moe"
    settings = peft.LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={"gate_up_proj": 2, "down_proj": 2},
        alpha_pattern={"gate_up_proj": 4, "down_proj": 4},
    )
    judge = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in judge.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    judge.save_pretrained(tmp_path / "fused")
    with pytest.raises(ValueError, match="one pair for all experts of a layer .*`marsrl export .*fused NEW` writes"):
        adapted(model, kind, str(tmp_path / "fused"))
    export(tmp_path / "fused", tmp_path / "split")
    policy = adapted(model, kind, str(tmp_path / "split"))
    (sample,) = sequences(1, seed=5)
    (batch,) = micro_batches([sample], 1)
    (found,) = policy.score([batch])
    with torch.no_grad():
        torch.testing.assert_close(found[batch.mask], hf_logprobs(judge, sample)[0], atol=2e-5, rtol=0)
