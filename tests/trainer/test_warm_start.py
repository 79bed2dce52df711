"""Which policies are warm-started, by which school, and what is cached of it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import get_args

import pytest

from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.models.init_model import SHAPES
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.schools.schools import SCHOOLS, school_of
from marsrl.trainer.schools.warm_start import recipe_of, warm_starts


def test_policies_of_one_shape_share_a_warm_start_and_another_shape_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(config: object, out: Path, console: object, shape: str) -> None:
        made.append(shape)
        out.mkdir(parents=True)
        (out / "shape").write_text(shape)

    monkeypatch.setattr("marsrl.trainer.schools.warm_start._make", make)
    os.environ["MARSRL_CACHE"] = str(tmp_path)
    shapes = {"a": "tiny", "b": None, "c": "cpu_default", "d": "tiny"}
    policies = {name: {"shape": shape} for name, shape in shapes.items()} | {"e": {"model": "/models/e"}}
    config = RunConfig.model_validate({"policies": policies, "agents": {"solver": {"policy": "a"}, **others("b")}})
    found = warm_starts(config, RunConsole(stream=io.StringIO()))
    assert {name: (each.model_dir / "shape").read_text() for name, each in found.items()} == {
        "a": "tiny", "b": "cpu_default", "c": "cpu_default", "d": "tiny"
    }  # fmt: skip
    assert made == ["tiny", "cpu_default"] and not any(each.is_cached for each in found.values())
    assert all(each.is_cached for each in warm_starts(config, RunConsole(stream=io.StringIO())).values())
    alone = RunConfig.model_validate({})
    assert recipe_of(alone) == recipe_of(config)  # what was cached before there were shapes still counts


def others(policy: str) -> dict[str, dict[str, str]]:
    return {name: {"policy": policy} for name in ("verifier1", "corrector1", "verifier2", "corrector2")}


def test_every_shape_that_a_policy_may_have_can_be_made() -> None:
    (choice, _) = get_args(PolicyConfig.model_fields["shape"].annotation)
    assert set(get_args(choice)) <= SHAPES.keys()


def searching(*words: str) -> RunConfig:
    return read_config(None, ["preset=cpu_search_team", *words])[0]


def test_a_team_is_taught_by_its_own_school_and_depends_on_that_school_s_settings_alone() -> None:
    dual = read_config(None, ["preset=cpu_dual_system"])[0]
    assert [school_of(config) for config in (RunConfig.model_validate({}), searching(), dual)] == list(SCHOOLS)
    for words in (
        "task_options.wording=sentences",
        "task_options.calculations=0.1",
        "agents.answer.prompt=qa",
        "data.train=q.jsonl",
    ):
        assert school_of(searching(words)) is None
        with pytest.raises(ValueError, match=r"set policies.main.model, or task=arithmetic, or preset=cpu_search_team"):
            recipe_of(searching(words))
    with pytest.raises(
        ValueError, match=r"policies.main.model is not set, and nobody teaches this team .*, or task=arithm"
    ):
        preflight(searching("agents.answer.prompt=qa"), world_size=1)
    chains, facts = read_config(None, [])[0], searching()
    slips = "warm_start.search_team.slip_router=0.5"
    assert recipe_of(dual) == recipe_of(read_config(None, ["preset=cpu_dual_system", slips])[0])
    assert recipe_of(searching(slips)) != recipe_of(facts) != recipe_of(searching("task_options.people=30"))
    assert recipe_of(read_config(None, [slips])[0]) == recipe_of(chains)
