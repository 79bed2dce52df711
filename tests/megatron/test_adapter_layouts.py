"""Every layout trains adapters as one rank does, and goes on from the checkpoint of another: two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapter_layouts_worker
import pytest
import torch
from adapter_layouts_worker import resume, run
from megatron_models import largest_difference, save_model
from rank_pair import RankPair

from marsrl.rollout.adapter import read_tensors
from marsrl.trainer.learner.megatron import parallel
from marsrl.trainer.models.export import export

LAYOUTS: dict[str, dict[str, tuple[dict[str, int], str]]] = {
    "qwen3": {
        "dp2": ({}, "none"),
        "tp2": ({"tensor": 2}, "none"),
        "tp2_full": ({"tensor": 2}, "full"),
        "pp2": ({"pipeline": 2}, "none"),
        "pp2_selective": ({"pipeline": 2}, "selective"),
        "cp2": ({"context": 2}, "none"),
    },
    "qwen3_moe": {
        "dp2": ({}, "none"),
        "ep2": ({"expert": 2}, "none"),
        "tp2_ep2": ({"tensor": 2, "expert": 2}, "none"),
        "tp2_ep2_full": ({"tensor": 2, "expert": 2}, "full"),
    },
}
CASES = [f"{kind}/{name}" for kind, own in LAYOUTS.items() for name in own]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPair) -> dict[str, Any]:
    """{kind/layout: what run() found}: one rank in this process, two in their own."""
    folder = tmp_path_factory.mktemp("adapters")
    models = {kind: str(save_model(kind, folder / "models" / kind)) for kind in LAYOUTS}
    arguments = {"out": str(folder / "two.pt"), "models": models, "layouts": LAYOUTS}
    two_ranks.run(Path(adapter_layouts_worker.__file__), arguments)
    found: dict[str, Any] = torch.load(folder / "two.pt", weights_only=True)  # written a moment ago
    found["folder"] = folder
    for kind, own in LAYOUTS.items():
        found[f"{kind}/one"] = run(models[kind], kind, {}, "none", folder / kind / "one")
        parallel.stop(keep_world=True)
        for name in own:
            found[f"{kind}/{name}, on one rank"] = resume(models[kind], kind, {}, folder / kind / name)
            parallel.stop(keep_world=True)
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_layout_trains_adapters_as_one_rank(case: str, reports: dict[str, Any]) -> None:
    found, one = reports[case], reports[f"{case.partition('/')[0]}/one"]
    assert found["numbers"] == pytest.approx(one["numbers"], rel=1e-4, abs=2e-6)  # norms, too
    assert found["base moved"] == 0
    for name in ("a", "b"):
        assert (
            largest_difference(found[name], one[name]) < 2e-3
        )  # where a gradient is rounding, AdamW steps by its sign


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_adapters_goes_on_under_its_layout_and_on_one_rank(case: str, reports: dict[str, Any]) -> None:
    assert reports[f"{case}, resumed"] == pytest.approx(reports[case]["third"], rel=1e-5, abs=1e-7)
    assert reports[f"{case}, on one rank"] == pytest.approx(reports[case]["third"], rel=1e-4, abs=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_export_of_a_checkpoint_is_what_the_ranks_held(case: str, reports: dict[str, Any], tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(reports["folder"] / case / name, tmp_path / name)
        files = read_tensors(tmp_path / name)
        assert files.keys() == reports[case][name].keys()
        assert all(torch.equal(tensor, reports[case][name][n]) for n, tensor in files.items())
