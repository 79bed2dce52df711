"""Every arm of an ablation is a config that starts, and says what it is called."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_up_run import make_run
from scripts import BENCHMARKS, script

from marsrl.trainer.config.read import read_config

sys.path.insert(0, str(BENCHMARKS))  # namespace, which the script imports
ablations, evidence = script("ablations"), script("evidence")


@pytest.mark.parametrize("name", ablations.ABLATIONS)
def test_every_cell_is_accepted_and_differs_from_the_others(name: str) -> None:
    ablation = ablations.ABLATIONS[name]
    configs = [read_config(None, [f"preset={ablation.preset}", *settings])[0] for _, settings in ablation.cells()]
    for (cell, _), config in zip(ablation.cells(), configs, strict=True):
        assert configs.count(config) == 1, cell
        assert {*ablation.agents, *ablation.evaluated} <= set(config.agents)


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


def test_what_a_training_has_shown(tmp_path: Path) -> None:
    small = replace(ablations.ABLATIONS["marsrl"], agents=("solver",))
    run = make_run(tmp_path)
    numbers, curves = ablations.shown(small, run.path)
    assert set(small.columns) <= set(numbers)
    assert (numbers["system"], numbers["system_before"]) == (
        pytest.approx(0.91, abs=0.01),
        pytest.approx(0.58, abs=0.01),
    )
    assert curves["actor/entropy"] == pytest.approx([0.3 - 0.02 * step for step in range(6)])
    assert len(curves["reward/solver/mean"]) == 6 and None not in curves["reward/solver/mean"]


def record(arm: str, seed: int, found: object, entropy: list[float | None] | None = None) -> dict[str, Any]:
    return {"arm": arm, "seed": seed, "found": found, "curves": {"actor/entropy": entropy or [0.2, 0.1]}}


CLAIM = evidence.Claim(
    "A claim's title",
    "A paper",
    "it says.",
    "ablations_marsrl",
    ("whole", "gate off"),
    "it is seen.",
    {"system": "team"},
)


def test_a_table_tells_arms_apart_seed_by_seed() -> None:
    records = [record("whole", seed, {"system": 0.5 + 0.1 * seed}) for seed in range(3)]
    records += [record("gate off", seed, {"system": 0.4 + 0.1 * seed + 0.001 * (seed - 1)}) for seed in range(3)]
    *_, whole, off = evidence.table(CLAIM, evidence.arms_of(CLAIM, records)).splitlines()
    assert whole == "| whole | 0.500, 0.600, 0.700 | 0.600 ± 0.248 | – |"
    assert off == "| gate off | 0.399, 0.500, 0.601 | 0.500 ± 0.251 | -0.100 ± 0.002, told apart |"
    records[3:] = [record("gate off", seed, {"system": value}) for seed, value in enumerate((0.9, 0.3, 0.6))]
    records += [record("gate off", 3, "RuntimeError: it stopped")]
    off = evidence.table(CLAIM, evidence.arms_of(CLAIM, records)).splitlines()[-1]
    assert "(1 stopped)" in off and off.endswith("not told apart |")
    with pytest.raises(ValueError, match="ablations_marsrl.json has no whole training of 'gate off'"):
        evidence.arms_of(CLAIM, records[:3])


def test_the_page_is_made_of_the_results_that_are_there() -> None:
    assert evidence.PAGE.read_text("utf-8") == evidence.page(), "run `python benchmarks/evidence.py`"
    drawn = sorted(path.name for path in evidence.PICTURES.iterdir())
    assert drawn == sorted(claim.picture for claim in evidence.CLAIMS)
    for name in drawn:
        assert ElementTree.parse(evidence.PICTURES / name).getroot().tag.endswith("svg")
