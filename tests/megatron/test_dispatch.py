"""Stand-ins for DeepEP and HybridEP over gloo train as the all-to-all does. A dispatcher without its library is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dispatch_worker
import fake_deep_ep
import pytest
import torch
from megatron_models import largest_difference, save_model
from rank_pair import RankPair

from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.checks.policy_files import check_trainable
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError, read_config
from marsrl.trainer.learner.megatron import layer_choice
from marsrl.trainer.learner.megatron.layer_choice import why_not_dispatcher

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep2": ({"expert": 2}, {}),
    "ep2_recomputed": ({"expert": 2}, {"recompute": "full", "router_aux_loss": 0.05}),
    "tp2_ep2_replayed": ({"tensor": 2, "expert": 2}, {"router_replay": "rollout", "recompute": "selective"}),
    "tp2_etp2": ({"tensor": 2}, {"router_replay": "recompute"}),
    "ep2_adapter": ({"expert": 2}, {"adapter": {"targets": ["attention", "experts"]}}),
}
OVERLAPPED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2_ep2_padded": ({"tensor": 2, "expert": 2}, {"router_aux_loss": 0.05}),
    "ep2_selective": ({"expert": 2}, {"router_replay": "rollout", "recompute": "selective"}),
    "ep2_adapter_selective": (
        {"expert": 2},
        {"adapter": {"targets": ["attention", "experts"]}, "recompute": "selective"},
    ),
    "ep2_reduced": (
        {"expert": 2},
        {"optimizer": {"lr": 1e-2, "overlap_grad_reduce": True, "overlap_param_gather": True}},
    ),
    "ep2_shared_prefixes": ({"expert": 2}, {"num_shared": 2}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPair) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("dispatch")
    model = save_model("qwen3_moe", folder / "m")
    job = {"out": str(folder / "found.pt"), "model": str(model), "cases": CASES, "overlaps": OVERLAPPED}
    two_ranks.run(Path(dispatch_worker.__file__), job)
    report: dict[str, Any] = torch.load(folder / "found.pt", weights_only=True)  # written by this test just now
    return report


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dispatcher", "calls"),
    [("deepep", ["combine", "dispatch"]), ("hybridep", ["combine_with_unpermute", "dispatch_with_permute"])],
)
def test_every_dispatcher_takes_the_same_steps(
    results: dict[str, Any], case: str, dispatcher: str, calls: list[str]
) -> None:
    expected, other = results[f"{case}/alltoall"], results[f"{case}/{dispatcher}"]
    assert (expected["calls"], other["calls"]) == ([], calls)
    for ours, theirs in zip(other["stats"], expected["stats"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-6)
    assert largest_difference(other["weights"], expected["weights"]) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("case", OVERLAPPED)
@pytest.mark.parametrize("dispatcher", dispatch_worker.DISPATCHERS)
def test_overlapped_micro_batches_take_the_same_steps(results: dict[str, Any], case: str, dispatcher: str) -> None:
    plain, overlapped = results[f"{case}/{dispatcher}"]
    assert overlapped["stats"] == plain["stats"]
    assert largest_difference(overlapped["weights"], plain["weights"]) == 0.0
    forward, backward = ["forward 1", "forward 2"], ["backward 2", "backward 1"]
    assert plain["order"] == (forward + backward) * 4  # two steps of two micro-batches
    assert overlapped["order"] == [*forward, "forward 1", "backward 2", "forward 2", "backward 1", *backward] * 2


def test_a_dispatcher_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_dispatcher("alltoall", 1) is None
    assert why_not_dispatcher("deepep", 2) == "PyTorch sees no CUDA device"
    monkeypatch.setattr(layer_choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "no deep_ep.Buffer: import of deep_ep halted" in str(why_not_dispatcher("deepep", 2))
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=fake_deep_ep.Buffer))
    assert why_not_dispatcher("deepep", 8) is None
    assert "the 6 ranks of layout.expert x layout.expert_tensor (Unsu" in str(why_not_dispatcher("deepep", 6))
    assert "no deep_ep.HybridEPBuffer: " in str(why_not_dispatcher("hybridep", 8))  # a deep_ep of another branch
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    for version, reason in {"0.16.1": "megatron-core 0.16.1 does not pad ranks", "0.19.2": "None"}.items():
        monkeypatch.setattr(layer_choice, "version", lambda name, version=version: version)
        assert str(why_not_dispatcher("hybridep", 8)).startswith(reason)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("layout.expert=1", "policies.main.layout.expert is 1; set above 1, or overlap_dispatch=false"),
        ("layout.pipeline=2", "policies.main.layout.pipeline is 2; set 1"),
        ("recompute=full", "policies.main.recompute is full; set none or selective"),
        ("dtype=float32", "policies.main.dtype is float32; set bfloat16"),
    ],
)
def test_settings_that_cannot_overlap_are_refused(word: str, reason: str) -> None:
    settings = ["overlap_dispatch=true", "layout.expert=2", "dtype=bfloat16", word]
    with pytest.raises(ConfigError, match=f"policies.main.overlap_dispatch is true, but {reason}"):
        read_config(None, [f"policies.main.{each}" for each in settings])


def test_one_expert_on_each_rank_cannot_overlap(tmp_path: Path) -> None:
    folder = save_model("qwen3_moe", tmp_path / "m")
    policy = {"model": str(folder), "overlap_dispatch": True, "dtype": "bfloat16", "layout": {"expert": 4}}
    config = RunConfig.model_validate({"policies": {"main": policy}})
    with pytest.raises(
        ConfigError, match="overlap_dispatch is true, but layout.expert=4 leaves one expert on each rank"
    ):
        check_trainable(config, "main", read_shape(folder), 4)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["layout.expert=1"], "policies.main.layout keeps all experts on each rank; set layout.expert above 1"),
        (
            ["dtype=float32"],
            "which sums only bfloat16, but policies.main.dtype is float32; set bfloat16, or dispatcher",
        ),
    ],
)
def test_a_dispatcher_that_cannot_serve_the_policy_is_refused(words: list[str], reason: str) -> None:
    settings = ["dispatcher=deepep", "layout.expert=2", *words]
    with pytest.raises(ConfigError, match=f"policies.main.dispatcher is deepep, .*{reason}"):
        read_config(None, [f"policies.main.{each}" for each in settings])


def test_preflight_refuses_a_dispatcher_without_experts_or_gpu(tmp_path: Path) -> None:
    reasons = {"qwen3": "a Qwen3ForCausalLM without experts", "qwen3_moe": "PyTorch sees no CUDA device"}
    for kind, reason in reasons.items():
        folder = save_model(kind, tmp_path / kind)
        policy = {"model": str(folder), "dispatcher": "hybridep", "dtype": "bfloat16", "layout": {"tensor": 2}}
        config = RunConfig.model_validate({"policies": {"main": policy}})
        with pytest.raises(ConfigError, match=rf"policies\.main\.dispatcher is hybridep, but .*{reason}; set alltoall"):
            check_trainable(config, "main", read_shape(folder), 2)
