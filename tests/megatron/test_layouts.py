"""Every layout trains the same model, and goes on from the checkpoint of another: two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layouts_worker
import pytest
import torch
from layouts_worker import resume, run, updates
from megatron_models import save_model
from rank_pair import RankPair
from safetensors.torch import load_file

from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.models.export import export

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
        ("dp2", "dp2"),
        ("tp2_ep2", "tp2_ep2"),
        ("tp2_etp2", "dp2"),
        ("ep2", "dp2"),
        ("pp2", "tp2_etp2"),
        ("dp2", "ep2"),
    ],
    "llama": [("pp2", "tp2")],
    "qwen3": [("tp2", "dp2"), ("pp2", "tp2"), ("pp2", "pp2")],  # pp2, tied: a padded bucket in the optimizer
}


UPDATED = {  # by trainer.router_replay
    "dp2": ["rollout"],
    "tp2_ep2": ["rollout", "recompute"],
    "pp2": ["rollout", "recompute"],
    "cp2": ["rollout"],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPair) -> dict[str, Any]:
    """{kind/layout: losses, norms, metrics, scores and weights}: one rank in this process, two in their own."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {kind: str(save_model(kind, folder / kind)) for kind in TWO}
    models["reference"] = str(save_model("qwen3_moe", folder / "reference", seed=1))
    two_ranks.run(
        Path(layouts_worker.__file__),
        {"out": str(folder / "two.pt"), "models": models, "layouts": TWO, "resumed": RESUMED, "updated": UPDATED},
    )
    # Written by this very test a moment ago; tensors and numbers only.
    found: dict[str, Any] = torch.load(folder / "two.pt", weights_only=True)
    found["checkpoints"] = folder / "checkpoints"
    for router_replay in ("rollout", "recompute"):
        found[f"one, {router_replay}"] = updates(models["qwen3_moe"], models["reference"], {}, router_replay)
    parallel.stop(keep_world=True)
    for kind in TWO:
        model = models[kind]
        found[f"{kind}/one"] = run(model, {})
        parallel.stop(keep_world=True)
        for name in TWO[kind]:
            found[f"{kind}/{name} -> one"] = resume(model, {}, folder / "checkpoints" / kind / name)
            parallel.stop(keep_world=True)
    return found


@pytest.mark.parametrize("name", [f"{kind}/{layout}" for kind, layouts in TWO.items() for layout in layouts])
def test_two_ranks_train_as_one(reports: dict[str, Any], name: str) -> None:
    one, two = reports[name.split("/")[0] + "/one"], reports[name]
    assert one["untouched"].keys() == two["untouched"].keys()
    assert all(torch.equal(one["untouched"][n], two["untouched"][n]) for n in one["untouched"])  # converted bit for bit
    expected, found = (torch.tensor(each["stats"], dtype=torch.float64) for each in (one, two))
    assert torch.allclose(found, expected, rtol=3e-6, atol=2e-6), (found - expected).abs().max()
    assert two["scores"][0] == pytest.approx(one["scores"][0], rel=1e-5)
    # Roundings are drawn anew, their size is the model's.
    assert two["scores"][1] == pytest.approx(one["scores"][1], rel=0.5)
    for n, weight in one["weights"].items():
        # AdamW's first steps are lr * sign(g) where g is at rounding: a few weights may differ by that, of a bias one.
        off = (two["weights"][n] - weight).abs() > 1e-4
        assert int(off.sum()) <= max(weight.dim() == 1, 3e-3 * weight.numel()), n


@pytest.mark.parametrize("name", [f"{kind}/{layout}" for kind, layouts in TWO.items() for layout in layouts])
def test_a_rank_reads_what_it_holds_and_no_more(reports: dict[str, Any], name: str) -> None:
    read, held = reports[name]["loaded"]
    padding = 2 * 32  # one row of zeros in the embedding and in the head, where tensor ranks cut 61 rows
    assert held - padding <= read <= held


CUT = [
    f"{kind}/{name}"
    for kind, each in TWO.items()
    for name, sizes in each.items()
    if {"tensor", "pipeline"} & set(sizes)
]


@pytest.mark.parametrize("name", CUT)
def test_a_checkpoint_of_two_ranks_exports_the_weights_that_they_trained(
    reports: dict[str, Any], name: str, tmp_path: Path
) -> None:
    export(reports["checkpoints"] / name, tmp_path / "out")
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
    """Weights, moments and step count of the optimizer; bit for bit where the layout is the same."""
    unbroken, resumed = reports[f"{kind}/{before}"]["third"], reports[f"{kind}/{before} -> {after}"]
    if before == after:
        assert resumed == unbroken
    else:
        assert resumed == pytest.approx(unbroken, rel=1e-5, abs=2e-6)
    assert unbroken[0] != reports[f"{kind}/{before}"]["stats"][1][0]  # the steps do move the loss


@pytest.mark.parametrize(("name", "router_replay"), [(name, each) for name, own in UPDATED.items() for each in own])
def test_two_ranks_do_the_updates_of_one(reports: dict[str, Any], name: str, router_replay: str) -> None:
    """Several updates, the KL reference, replayed experts, means over samples and agents; the tokens that are kept."""
    (steps, kept), (expected_steps, expected_kept) = (reports[f"{of}, {router_replay}"] for of in (name, "one"))
    for found, expected in zip(steps, expected_steps, strict=True):
        assert found[:4] == pytest.approx(expected[:4], rel=2e-4)  # after three AdamW updates by rounding
        tokens, differ, choices, choices_differ = found[4:]
        assert (tokens, choices) == (expected[4], expected[6])
        assert abs(differ - expected[5]) <= 1 and abs(choices_differ - expected[7]) <= 1
    assert kept.keys() == {"s1", "s2", "s6"}
    for uid, (number, *expected) in expected_kept.items():
        assert kept[uid][0] == number == (2 if uid == "s6" else 1)
        for column, values in zip(kept[uid][1:3], expected[:2], strict=True):
            assert column == pytest.approx(values, abs=1e-3 if number == 2 else 1e-5), uid
        assert number == 2 or kept[uid][3] == expected[2] == [0] * len(expected[2])  # ratios of 1


def test_an_update_clips_and_changes_choices(reports: dict[str, Any]) -> None:
    """So that the test before compares something."""
    (of_rollout, _), (of_recompute, tokens) = (reports[f"one, {each}"] for each in ("rollout", "recompute"))
    assert any(1 in marks for _, _, _, marks in tokens.values())
    assert 0 < of_recompute[1][5] < of_rollout[0][5]
