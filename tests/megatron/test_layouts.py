"""Layouts of two gloo ranks train as one rank and resume others' checkpoints; unfit ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layouts_worker
import pytest
import torch
from megatron_models import largest_difference, save_model
from rank_pair import RankPair
from safetensors.torch import load_file

from marsrl.commands.models.export import export
from marsrl.rollout.adapter import read_tensors
from marsrl.rollout.model_shape import ModelShape
from marsrl.trainer.config import LayoutConfig
from marsrl.trainer.learner.megatron.layout import check, resolve

pytestmark = pytest.mark.slow

TWO = {
    "qwen3_moe": {
        "dp2": {},
        "ep2": {"expert": 2},
        "tp2_etp2": {"tensor": 2},
        "tp2_ep2": {"tensor": 2, "expert": 2},
        "pp2": {"pipeline": 2},
        "cp2": {"context": 2},
    },
    "qwen3": {"dp2": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "cp2": {"context": 2}},
    "llama": {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}},
}
RESUMED = {
    "qwen3_moe": [
        ("dp2", "dp2"), ("tp2_ep2", "tp2_ep2"), ("tp2_etp2", "dp2"), ("ep2", "dp2"), ("pp2", "tp2_etp2"), ("dp2", "ep2"),
    ],
    "llama": [("pp2", "tp2")],
    # With tied embeddings, pp2 gives the optimizer a padded bucket.
    "qwen3": [("tp2", "dp2"), ("pp2", "tp2"), ("pp2", "pp2")],
}  # fmt: skip
# {layout: values of trainer.router_replay}
UPDATED = {"dp2": ["rollout"], "tp2_ep2": ["rollout", "recompute"], "pp2": ["rollout", "recompute"], "cp2": ["rollout"]}
# Cases with tensor or pipeline ranks use recomputation. Adapters without recomputation are compared with PEFT by test_parity.py.
ADAPTED: dict[str, dict[str, tuple[dict[str, int], str]]] = {
    "qwen3": {
        "dp2": ({}, "none"),
        "tp2_full": ({"tensor": 2}, "full"),
        "pp2_selective": ({"pipeline": 2}, "selective"),
        "cp2": ({"context": 2}, "none"),
    },
    "qwen3_moe": {
        "dp2": ({}, "none"),
        "ep2": ({"expert": 2}, "none"),
        "tp2_ep2_full": ({"tensor": 2, "expert": 2}, "full"),
    },
}
CASES = [f"{kind}/{name}" for kind, layouts in TWO.items() for name in layouts]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPair) -> dict[str, Any]:
    """Results of layouts_worker by case: of two ranks, and, in this process, of one rank."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {kind: str(save_model(kind, folder / kind)) for kind in TWO}
    models["reference"] = str(save_model("qwen3_moe", folder / "reference", seed=1))
    of_two = {"layouts": TWO, "resumed": RESUMED, "updated": UPDATED, "adapters": ADAPTED}
    of_two["resumed_adapters"] = {kind: [(name, name) for name in own] for kind, own in ADAPTED.items()}
    of_one = {
        "layouts": {kind: {"one": {}} for kind in TWO},
        "resumed": {kind: [(name, "one") for name in own] for kind, own in TWO.items()},
        "updated": {"one": ["rollout", "recompute"]},
        "adapters": {kind: {"one": ({}, "none")} for kind in ADAPTED},
        "resumed_adapters": {kind: [(name, "one") for name in own] for kind, own in ADAPTED.items()},
    }
    two_ranks.run(Path(layouts_worker.__file__), {"out": str(folder / "two.pt"), "models": models, **of_two})
    layouts_worker.job(str(folder / "one.pt"), models, **of_one)
    # The files were written by this test, and hold only tensors and numbers.
    one, two = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("one", "two"))
    return {"folder": folder, **one, **two}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one(reports: dict[str, Any], name: str) -> None:
    one, two = reports[name.split("/")[0] + "/one"], reports[name]
    assert one["untouched"].keys() == two["untouched"].keys()
    # Export of untrained weights changes no bit.
    assert all(torch.equal(one["untouched"][n], two["untouched"][n]) for n in one["untouched"])
    expected, found = (torch.tensor(each["stats"], dtype=torch.float64) for each in (one, two))
    assert torch.allclose(found, expected, rtol=3e-6, atol=2e-6), (found - expected).abs().max()
    assert two["scores"][0] == pytest.approx(one["scores"][0], rel=1e-5)
    # Rounding errors differ between layouts, but their size depends on the model alone.
    assert two["scores"][1] == pytest.approx(one["scores"][1], rel=0.5)
    for n, weight in one["weights"].items():
        # Where a gradient g is only a rounding error, AdamW's first steps are lr * sign(g), which differ. This may affect 0.3 %
        # of a matrix, and one number of a vector.
        off = (two["weights"][n] - weight).abs() > 1e-4
        assert int(off.sum()) <= max(weight.dim() == 1, 3e-3 * weight.numel()), n


@pytest.mark.parametrize("name", CASES)
def test_ranks_read_only_their_shards_and_export_trained_weights(
    reports: dict[str, Any], name: str, tmp_path: Path
) -> None:
    read, held = reports[name]["loaded"]
    padding = 2 * 32  # one row of zeros in the embedding and in the head, where tensor ranks split 61 rows
    assert held - padding <= read <= held
    export(reports["folder"] / "checkpoints" / name, tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), reports[name]["weights"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(kind, *pair) for kind, pairs in RESUMED.items() for pair in pairs]
    + [(kind, name, "one") for kind, layouts in TWO.items() for name in layouts],
)
def test_a_run_goes_on_under_another_layout_as_under_its_own(
    reports: dict[str, Any], kind: str, before: str, after: str
) -> None:
    """The optimizer's weights, moments and step count are restored too. With the same layout, results are bitwise equal."""
    unbroken, resumed = reports[f"{kind}/{before}"]["third"], reports[f"{kind}/{before} -> {after}"]
    if before == after:
        assert resumed == unbroken
    else:
        assert resumed == pytest.approx(unbroken, rel=1e-5, abs=2e-6)
    assert unbroken[0] != reports[f"{kind}/{before}"]["stats"][1][0]  # the steps do change the loss


@pytest.mark.parametrize(("name", "router_replay"), [(name, each) for name, own in UPDATED.items() for each in own])
def test_two_ranks_compute_the_updates_of_one(reports: dict[str, Any], name: str, router_replay: str) -> None:
    """Covers several updates, the KL reference, replayed experts, means over samples and agents, and kept tokens."""
    (steps, kept, errors), (expected_steps, expected_kept, _) = (
        reports[f"{of}, {router_replay}"] for of in (name, "one")
    )
    too_long = "rank 0: ValueError: packing: a sequence has"
    assert len(errors) == 2 and all(each.startswith("scatter: ") and too_long in each for each in errors)
    for found, expected in zip(steps, expected_steps, strict=True):
        assert found[:4] == pytest.approx(expected[:4], rel=2e-4)  # within rounding after three AdamW updates
        tokens, differ, choices, choices_differ = found[4:]
        assert (tokens, choices) == (expected[4], expected[6])
        assert abs(differ - expected[5]) <= 1 and abs(choices_differ - expected[7]) <= 1
    assert kept.keys() == {"s1", "s2", "s7"}
    for uid, (number, *expected) in expected_kept.items():
        assert kept[uid][0] == number == (2 if uid == "s7" else 1)
        for column, values in zip(kept[uid][1:3], expected[:2], strict=True):
            assert column == pytest.approx(values, abs=1e-3 if number == 2 else 1e-5), uid
        assert number == 2 or kept[uid][3] == expected[2] == [0] * len(expected[2])  # the first update has ratios of 1
    # There are choices that differ and clipped tokens to compare.
    assert expected_steps[1][5] > 0 and any(1 in marks for *_, marks in expected_kept.values())


@pytest.mark.parametrize("case", [f"{kind}/{name}" for kind, own in ADAPTED.items() for name in own])
def test_adapters_train_resume_and_export_as_on_one_rank(case: str, reports: dict[str, Any], tmp_path: Path) -> None:
    kind, _, name = case.partition("/")
    results, one = reports[f"adapters, {case}"], reports[f"adapters, {kind}/one"]
    assert results["numbers"] == pytest.approx(one["numbers"], rel=1e-4, abs=2e-6)  # including norms
    assert results["base stays"]
    assert reports[f"adapters, {case} -> {name}"] == pytest.approx(results["third"], rel=1e-5, abs=1e-7)
    assert reports[f"adapters, {case} -> one"] == pytest.approx(results["third"], rel=1e-4, abs=2e-6)
    for policy in ("a", "b"):
        # Where a gradient is a rounding error, AdamW steps by its sign.
        assert largest_difference(results[policy], one[policy]) < 2e-3
        export(reports["folder"] / "adapters" / case / policy, tmp_path / policy)
        assert largest_difference(read_tensors(tmp_path / policy), results[policy]) == 0.0


SHAPE = ModelShape("Qwen3MoeForCausalLM", 6, 32, 12, 6, 16, 24, 61, 128, 1e4, 1e-6, False, False, True, 8, 2)


@pytest.mark.parametrize(
    ("layout", "world", "says"),
    [
        ({"tensor": 5}, 5, "layout.tensor is 5, which does not divide the 12 attention heads"),
        ({"tensor": 4, "expert": 2}, 8, "layout.tensor is 4, which does not divide the 6 key/value heads"),
        ({"expert": 3}, 3, "layout.expert is 3, which does not divide the 8 experts"),
        ({"expert": 2, "expert_tensor": 5}, 10, "layout.expert_tensor is 5, which does not divide the 24 units"),
        ({"pipeline": 4}, 4, "layout.pipeline is 4, which does not divide the 6 layers"),
        ({"tensor": 2}, 3, "is 2, which does not divide the 3 ranks"),
        ({"expert": 4}, 2, "is 4, which does not divide the 2 ranks"),
        ({"tensor": 2, "expert_tensor": 1}, 2, "expert 1 with expert_tensor 1 and tensor 2"),
        ({"context": 2}, 3, "layout.context is 2, which does not divide the 3 ranks"),
        ({"tensor": 4, "expert": 4}, 8, "on 8 rank.s. this would fit: tensor 2, expert 4$"),  # 6 key/value heads
        ({"tensor": 2, "expert_tensor": 1}, 4, "on 4 rank.s. this would fit: tensor 2$"),
        ({"pipeline": 4}, 12, "on 12 rank.s. this would fit: pipeline 3$"),  # 6 layers
        ({"tensor": 7}, 7, "on 7 rank.s. this would fit: data parallel only$"),
        ({"expert": 16}, 16, "on 16 rank.s. this would fit: expert 8$"),
    ],
)
def test_an_unfit_layout_is_refused_with_the_nearest_fit(layout: dict[str, int], world: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check(resolve(LayoutConfig(**layout)), SHAPE, world)
