"""Every arm of an ablation is a config that starts, and says what it is called."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from scripts import BENCHMARKS, script

from marsrl.trainer.config.read import read_config

sys.path.insert(0, str(BENCHMARKS))  # namespace, which the script imports
ablations = script("ablations")


@pytest.mark.parametrize("name", ablations.ABLATIONS)
def test_every_cell_is_accepted_and_differs_from_the_others(name: str) -> None:
    ablation = ablations.ABLATIONS[name]
    configs = [read_config(None, [f"preset={ablation.preset}", *settings])[0] for _, settings in ablation.cells()]
    for (cell, _), config in zip(ablation.cells(), configs, strict=True):
        assert configs.count(config) == 1, cell
        assert set(ablation.agents) <= set(config.agents)


def row(reward: float, entropy: float | None) -> dict[str, Any]:
    return {"reward/solver/mean": reward, "actor/entropy": entropy}


def test_quarters_are_of_the_steps_that_have_a_value() -> None:
    rows = [row(0.1, None), *(row(reward, reward) for reward in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9))]
    found = ablations.rewards(rows, ["solver"])
    assert found["solver_reward_first"] == pytest.approx(0.15) and found["solver_reward_last"] == pytest.approx(0.8)
    assert found["entropy_first"] == 0.2 and found["entropy_last"] == 0.9
    assert "solver_inflation" not in found and ablations.quarters("x", [None]) == {}


def test_some_arms_alone() -> None:
    marsrl = ablations.ABLATIONS["marsrl"]
    assert [cell for cell, _ in marsrl.only(["gate off"]).cells()] == [{"arm": "gate off"}]
    assert marsrl.only(None) is marsrl
    with pytest.raises(ValueError, match="there is no 'gate of'; arms: whole, outcome reward, .*gate off"):
        marsrl.only(["gate of"])
    with pytest.raises(ValueError, match="arms: none"):
        ablations.ABLATIONS["drmas"].only(["shared"])
