"""Computing shared prefixes once gives the flat batch's results in float64, on one and two ranks."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_models as tiny
import numpy as np
import prefixes_worker
import pytest
import torch
from rank_pair import RankPair
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.trainer.config import MptConfig
from marsrl.trainer.data.packing import pack
from marsrl.trainer.data.scatter import Update, micro_batches

KINDS = ("qwen2", "qwen3", "qwen3_moe", "llama")
ATTENTION: dict[str, Any] = {"rank": 4, "alpha": 8}
EXPERTS: dict[str, Any] = {"rank": 4, "expert_rank": 2, "alpha": 8, "targets": ["attention", "experts"]}
TWO_ADAPTERS = [ATTENTION, {**ATTENTION, "rank": 2, "targets": ["mlp"]}]
SEQUENCE = {"ratio": "sequence", "correction": "sequence_mask"}
ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "bias in attention": ("qwen2", {}),
    "all biases": ("llama", {}),
    "a whole tree": ("qwen3", {"max_tokens": 400}),
    "small micro-batches": ("qwen3", {"max_tokens": 26}),
    "recompute": ("qwen3", {"recompute": "full"}),
    "recompute but attention": ("qwen3", {"recompute": "full_but_attention"}),
    "selective recompute": ("qwen3_moe", {"recompute": "selective"}),
    "ratios of sequences": ("qwen3", {"objective": SEQUENCE}),
    "old log-probs": ("qwen3", {"old_policy": "recompute"}),
    "experts": ("qwen3_moe", {}),
    "experts of the rollout": ("qwen3_moe", {"router_replay": "rollout"}),
    "experts recorded first": ("qwen3_moe", {"router_replay": "recompute"}),
    "adapter": ("qwen3", {"adapters": [ATTENTION]}),
    "two adapters": ("qwen3", {"adapters": TWO_ADAPTERS, "max_tokens": 400}),
    "adapter of experts": ("qwen3_moe", {"adapters": [EXPERTS]}),
}
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen3", {}),
    "dp2, few micro-batches": ("qwen3", {"max_tokens": 400}),
    "tp2": ("qwen3", {"layout": {"tensor": 2}}),
    "tp2, all biases": ("llama", {"layout": {"tensor": 2}, "recompute": "full"}),
    "pp2": ("qwen3", {"layout": {"pipeline": 2}}),
    "pp2, old log-probs": ("qwen3", {"layout": {"pipeline": 2}, "old_policy": "recompute"}),
    "ep2": ("qwen3_moe", {"layout": {"expert": 2}}),
    "tp2 ep2": ("qwen3_moe", {"layout": {"tensor": 2, "expert": 2}, "router_replay": "rollout"}),
    "tp2 etp2": ("qwen3_moe", {"layout": {"tensor": 2}, "router_replay": "recompute"}),
    "adapters, dp2": ("qwen3", {"adapters": TWO_ADAPTERS}),
    "adapters, tp2": ("qwen3", {"adapters": TWO_ADAPTERS, "layout": {"tensor": 2}, "max_tokens": 400}),
    "adapters, pp2": ("qwen3", {"adapters": TWO_ADAPTERS, "layout": {"pipeline": 2}}),
    "adapters, ep2": ("qwen3_moe", {"adapters": [EXPERTS], "layout": {"expert": 2}}),
    "adapters, tp2 ep2": ("qwen3_moe", {"adapters": [EXPERTS], "layout": {"tensor": 2, "expert": 2}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: str(tiny.save_model(kind, folder / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def of_two(folders: dict[str, str], two_ranks: RankPair) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = two_ranks.run(
        Path(prefixes_worker.__file__), {"folders": folders, "cases": TWO}
    )
    return found


def check(differences: dict[str, float]) -> None:
    """Check the differences of trees and flat batches.

    The bound is the rounding of a float64 sum of some hundred terms. Old log-probs are float32 in both.
    """
    sizes = differences.pop("computed"), differences.pop("flat")
    assert 0 < sizes[0] < 0.9 * sizes[1]
    assert differences.pop("gated_samples") > 0
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize("name", ONE)
def test_a_tree_has_the_gradient_of_the_flat_batch(name: str, folders: dict[str, str]) -> None:
    kind, case = ONE[name]
    check(prefixes_worker.compare(folders[kind], case))


@pytest.mark.parametrize(
    "settings",
    [
        {"objective": PolicyObjective(kl="k3", kl_coef=0.3)},
        {"objective": PolicyObjective(kl="k3"), "reward_kl_coef": 0.3},
        {"mpt": MptConfig(scope="batch", entropy=4.0, probability=0.02)},
    ],
    ids=["kl", "kl in the reward", "gate of the batch"],
)
def test_a_step_of_trees_is_that_of_flat_batches(settings: dict[str, Any], tmp_path: Path) -> None:
    """Compares two float32 updates, of which the second has old log-probs, and each agent's gradient norm."""
    folder, other = (tiny.save_model("qwen3", tmp_path / f"{seed}", seed=seed) for seed in range(2))
    parts = [prefixes_worker.family(seed) for seed in range(2)]
    numbers = []
    for prefixes in ("off", "on"):
        reference = other if "objective" in settings else None
        policy = tiny.learner(folder, reference_dir=reference, **settings)
        shard = policy.shard(400, "on" if prefixes == "on" else "off")
        updates = [Update(tuple(micro_batches(part, shard)), tiny.num_trained(part)) for part in parts]
        stats = policy.train_step(updates, by_agent=True)
        sums = [value for name, values in stats.agent_sums.items() if name != "weighted_nll" for value in values]
        norms = [norm or 0.0 for norm in stats.agent_grad_norms]
        numbers.append([stats.loss, stats.grad_norm, stats.gated_samples, stats.k3, *sums, *norms])
        assert all(bool(batch.paths) == (prefixes == "on") for update in updates for batch in update.micro_batches)
    assert numbers[1] == pytest.approx(numbers[0], rel=2e-5, abs=1e-5)
    assert numbers[0][2] > 0 or "mpt" not in settings


def test_a_tree_without_a_trained_token_adds_nothing(tmp_path: Path) -> None:
    folder = tiny.save_model("qwen3", tmp_path / "m")
    sample, *_ = prefixes_worker.family()
    untrained = replace(sample, is_sampled=np.zeros(len(sample.is_sampled), bool))
    nothing = pack([untrained, untrained], shared=[0, 5])
    alone, beside = (tiny.step(tiny.learner(folder), [pack([sample]), *more], 5.0) for more in ([], [nothing]))
    assert (alone.loss, alone.grad_norm) == (beside.loss, beside.grad_norm) and alone.grad_norm > 0


class _KeepsKeys(torch.autograd.Function):
    """Keep whole keys and values for the backward pass, as kernels on GPUs do."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(k.transpose(0, 1), v)
        return k + v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        k, v = ctx.saved_tensors
        return grad * v, grad * k.transpose(0, 1)


def test_attention_keeps_no_copy_of_a_shared_key() -> None:
    from marsrl.trainer.learner.megatron.attention import gather_rows, save_ungathered

    ungathered = [torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    rows = torch.tensor([0, 1, 0, 2, 0, 3])
    expected = torch.autograd.grad((_KeepsKeys.apply(*(x[rows] for x in ungathered)) ** 2).sum(), ungathered)
    k, v = (gather_rows(x, rows) for x in ungathered)
    copies = [weakref.ref(x.untyped_storage()) for x in (k, v)]
    with save_ungathered(((k, ungathered[0]), (v, ungathered[1])), rows):
        output = _KeepsKeys.apply(k, v)
    del k, v
    assert [copy() for copy in copies] == [None, None]
    for gradient, other in zip(torch.autograd.grad((output**2).sum(), ungathered), expected, strict=True):
        assert torch.allclose(gradient, other, rtol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_two_ranks_compute_trees_as_flat_batches(name: str, of_two: dict[str, dict[str, float]]) -> None:
    check(of_two[name])
