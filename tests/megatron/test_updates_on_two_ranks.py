"""Several updates, the KL reference, replayed experts and means over samples and agents do not depend on the layout: two
gloo ranks against one."""

from __future__ import annotations

from pathlib import Path

import pytest
import updates_worker
from megatron_models import save_model
from rank_pair import RankPair
from updates_worker import run

from marsrl.trainer.learner.megatron import parallel

CASES = {
    "dp2": ({}, "rollout"),
    "tp2_ep2": ({"tensor": 2, "expert": 2}, "rollout"),
    "pp2": ({"pipeline": 2}, "rollout"),
    "cp2": ({"context": 2}, "rollout"),
    "tp2_ep2_r2": ({"tensor": 2, "expert": 2}, "recompute"),
    "pp2_r2": ({"pipeline": 2}, "recompute"),
}


def test_two_ranks_do_the_updates_of_one(tmp_path: Path, two_ranks: RankPair) -> None:
    model, reference = save_model("qwen3_moe", tmp_path / "m"), save_model("qwen3_moe", tmp_path / "r", seed=1)
    two = two_ranks.run(
        Path(updates_worker.__file__), {"model": str(model), "reference": str(reference), "cases": CASES}
    )
    one = {}
    for router_replay in ("rollout", "recompute"):
        one[router_replay] = run(str(model), str(reference), {}, router_replay)
        parallel.stop(keep_world=True)
    for name, (_, router_replay) in CASES.items():
        steps, kept = two[name]
        for found, expected in zip(steps, one[router_replay][0], strict=True):
            assert found[:4] == pytest.approx(expected[:4], rel=2e-4), name  # after three AdamW updates by rounding
            tokens, differ, choices, choices_differ = found[4:]
            assert (tokens, choices) == (expected[4], expected[6]), name
            assert abs(differ - expected[5]) <= 1 and abs(choices_differ - expected[7]) <= 1, name
        assert kept.keys() == {"s1", "s2", "s6"}
        for uid, (update, *expected) in one[router_replay][1].items():
            assert kept[uid][0] == update == (2 if uid == "s6" else 1)
            for column, values in zip(kept[uid][1:3], expected[:2], strict=True):
                assert column == pytest.approx(values, abs=1e-3 if update == 2 else 1e-5), (name, uid)
            assert update == 2 or kept[uid][3] == expected[2] == [0] * len(expected[2])  # ratios of 1
    assert any(1 in marks for _, _, _, marks in one["recompute"][1].values())
    assert 0 < one["recompute"][0][1][5] < one["rollout"][0][0][5]
