"""The router's balancing loss is computed over the whole update, however it is split.

The gradient equals plain PyTorch's in float64.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch
from torch import Tensor

from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.checks.policy_files import check_trainable
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.packing import TrainSequence, pack
from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.report.step_metrics import step_metrics

COEFFICIENT = 0.05
SAMPLES = 16
ROUTERS = {f"decoder.layers.{i}.mlp.router.weight": f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
# The embedding is an input of the routers, so their loss gives it a gradient too.
NAMES = {**ROUTERS, "embedding.word_embeddings.weight": "model.embed_tokens.weight"}


def samples_of_equal_worth() -> list[TrainSequence]:
    """Return samples without an advantage, so that the whole gradient comes from the balancing loss."""
    return [replace(s, advantage=0.0) for s in tiny.sequences(SAMPLES)]


def plain(folder: Path, samples: list[TrainSequence]) -> tuple[dict[str, Tensor], list[float]]:
    """Compute the balancing loss by its definition, in float64.

    Returns gradients by name, and [loss without its coefficient, largest load, smallest load].
    """
    model, inputs = tiny.scoring_model(folder).double(), dict[Any, list[Tensor]]()
    model.set_experts_implementation("eager")  # transformers' grouped experts do not support float64
    for layer in model.model.layers:
        inputs[layer.mlp.gate] = []
        layer.mlp.gate.register_forward_hook(lambda gate, given, _: inputs[gate].append(given[0].flatten(0, -2)))
    for s in samples:
        model(torch.tensor([[*s.prompt_ids.tolist(), *s.token_ids.tolist()]]))
    losses, loads = [], []
    for gate, given in inputs.items():
        probabilities = (torch.cat(given) @ gate.weight.T).softmax(-1)
        num_experts, top_k = probabilities.shape[1], model.config.num_experts_per_tok
        counts = probabilities.topk(top_k).indices.flatten().bincount(minlength=num_experts)
        shares = counts / counts.sum()
        losses.append(num_experts * (shares * probabilities.mean(0)).sum())
        loads.append(num_experts * shares)
    (COEFFICIENT * torch.stack(losses).sum()).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    of_layers = torch.stack(loads)
    return found, [float(torch.stack(losses).detach().mean()), float(of_layers.max()), float(of_layers.min())]


def error(policy: Learner, expected: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient, relative to its norm."""
    ours = tiny.gradients(policy)
    found = {n: ours[n][: expected[hf].shape[0]].double() for n, hf in NAMES.items()}
    return max(float((found[n] - expected[hf]).norm() / expected[hf].norm()) for n, hf in NAMES.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model("qwen3_moe", tmp_path_factory.mktemp("m") / "m")


def learner(folder: Path, **settings: Any) -> Learner:
    still = tiny.OPTIMIZER.model_copy(update={"lr": 0.0})
    return tiny.learner(folder, **{"router_aux_loss": COEFFICIENT, "optimizer": still, **settings})


@pytest.fixture(scope="module")
def judged(folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    return plain(folder, samples_of_equal_worth())


@pytest.mark.parametrize(
    ("cuts", "align", "settings"),
    [
        *((cuts, align, {}) for cuts in (1, 2, 4, 16) for align in (1, 64)),
        *((cuts, 4, {"recompute": recompute}) for cuts in (1, 4) for recompute in ("selective", "full")),
        (4, 4, {"recompute": "full", "router_replay": "recompute"}),
    ],
)
def test_no_cut_and_no_padding_changes_the_balancing_loss(
    folder: Path, judged: tuple[dict[str, Tensor], list[float]], cuts: int, align: int, settings: dict[str, str]
) -> None:
    expected, numbers = judged
    batches = [*tiny.micro_batches(samples_of_equal_worth(), cuts, align=align), *([pack([])] if cuts > 1 else [])]
    policy = learner(folder, **settings)
    stats = tiny.step(policy, batches)
    assert error(policy, expected) < 1e-6
    assert stats.load == pytest.approx(numbers, rel=1e-6)
    named = step_metrics(stats, ["a", "b"])
    assert [named[f"router/{name}"] for name in ("aux_loss", "load_max", "load_min")] == list(stats.load or ())


def test_a_later_update_counts_under_its_own_weights(folder: Path, tmp_path: Path) -> None:
    samples = samples_of_equal_worth()
    parts = [Update(tuple(tiny.micro_batches(part, 2)), 1.0) for part in (samples[::2], samples[1::2])]
    first, both = (learner(folder, optimizer=tiny.OPTIMIZER, old_policy="recompute") for _ in range(2))
    first.train_step(parts[:1])
    first.held().save_hf(tmp_path / "after", folder)
    both.train_step(parts)
    expected, _ = plain(tmp_path / "after", samples[1::2])
    assert error(both, expected) < 1e-5


@pytest.mark.parametrize(
    ("cuts", "settings", "passes"),
    [
        (1, {}, 1),
        (2, {}, 4),
        (2, {"router_aux_loss": 0.0}, 2),
        (2, {"router_replay": "recompute"}, 4),  # the pass that records the experts counts them
    ],
)
def test_experts_are_counted_with_few_extra_passes(
    folder: Path, cuts: int, settings: dict[str, Any], passes: int
) -> None:
    policy, forwards = learner(folder, **settings), list[int]()
    policy.model.register_forward_hook(lambda *_: forwards.append(1))
    stats = tiny.step(policy, tiny.micro_batches(samples_of_equal_worth(), cuts))
    assert len(forwards) == passes
    assert stats.load is not None


def test_a_dense_model_has_no_load_of_experts(tmp_path: Path) -> None:
    folder, passes = tiny.save_model("qwen3", tmp_path / "m"), list[int]()
    policy = learner(folder)
    policy.model.register_forward_hook(lambda *_: passes.append(1))
    stats = tiny.step(policy, tiny.micro_batches(tiny.sequences(4), 2))
    assert stats.load is None and not any(name.startswith("router/") for name in step_metrics(stats, ["a", "b"]))
    assert len(passes) == 2  # nothing is counted


def test_a_dense_model_refuses_a_balancing_loss(tmp_path: Path) -> None:
    config, _ = read_config(None, ["policies.main.router_aux_loss=0.1"])
    with pytest.raises(
        ValueError, match="router_aux_loss is 0.1, but policies.main.model is a Qwen3ForCausalLM without"
    ):
        check_trainable(config, "main", read_shape(tiny.save_model("qwen3", tmp_path / "m")), 1)
