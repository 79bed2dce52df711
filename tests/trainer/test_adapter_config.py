"""Policies with adapters: what a config says of them, and which it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config

MAIN = {"model": "/models/base", "dtype": "float32", "layout": {"tensor": 2}, "recompute": "full"}
TEAM = {"orchestration": "solver_verifier", "agents": {"solver": {"policy": "main"}, "verifier": {"policy": "checker"}}}


BASED = {"base": "main", "adapter": {}}
SERVED = {"model": "/m", "frozen": True, "engine": "openai", "openai": {"base_url": "http://h/v1", "model": "m"}}


def config(checker: dict[str, Any], main: dict[str, Any] | None = None, **others: Any) -> RunConfig:
    """The Solver is policy `main`, the Verifier `checker`."""
    policies = {"main": main or {**MAIN, "adapter": {}}, "checker": checker, **others.pop("policies", {})}
    return RunConfig.model_validate({**TEAM, "policies": policies, **others})


def test_a_policy_on_a_base_has_its_model_and_how_ranks_hold_it() -> None:
    found = config({"base": "main", "adapter": {"rank": 8}, "optimizer": {"lr": 1e-4}})
    main, checker = found.policies["main"], found.policies["checker"]
    assert (checker.model, checker.dtype, checker.recompute) == ("/models/base", "float32", "full")
    assert checker.layout == main.layout
    assert (checker.optimizer.lr, main.optimizer.lr) == (1e-4, 1e-6)
    assert list(found.trained_policies) == ["main", "checker"]
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(found.model_dump(mode="json"))))
    assert again == found


@pytest.mark.parametrize("main", [MAIN, {**MAIN, "frozen": True}], ids=["trained by nobody", "frozen"])
def test_a_base_without_an_adapter_stays(main: dict[str, Any]) -> None:
    found = config(BASED, main, credit={"train_agents": ["verifier"]})
    assert list(found.trained_policies) == ["checker"]


@pytest.mark.parametrize(
    ("checker", "main", "reason"),
    [
        ({"base": "other", "adapter": {}}, None, "policies.checker.base is other, which is not another policy (there is main)"),
        ({"base": "checker", "adapter": {}}, None, "policies.checker.base is checker, which is not another policy"),
        ({"base": "main"}, None, "policies.checker.adapter is not set: an adapter is what is trained of it"),
        ({**BASED, "frozen": True}, None, "policies.checker.frozen is true"),
        ({**BASED, "model": "/models/own"}, None, "policies.checker.model is /models/own"),
        ({**BASED, "dtype": "bfloat16"}, None, "policies.checker.dtype is bfloat16, and it has its base's"),
        ({**BASED, "layout": {"tensor": 1}}, None, "policies.checker.layout is"),
        (BASED, MAIN, "its policy main is the base of checker, whose weights stay"),
        ({**BASED, "router_aux_loss": 0.1}, None, "policies.checker.router_aux_loss is 0.1"),
        ({"model": "/m", "adapter": {"targets": ["mlp", "mlp"]}}, None, "adapter.targets names one twice"),
        (BASED, SERVED, "policies.checker.base is main, which a server answers for"),
    ],
)  # fmt: skip
def test_what_contradicts_a_base_is_refused(checker: dict[str, Any], main: dict[str, Any] | None, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        config(checker, main)


def test_a_base_of_a_base_is_refused() -> None:
    third = {"third": {"base": "checker", "adapter": {}}}
    said = "policies.third.base is checker, which is built on main itself: name that one"
    with pytest.raises(ValueError, match=said):
        config(BASED, MAIN, policies=third)


def test_a_judge_does_not_decode_in_the_engines_of_adapters() -> None:
    team = {name: {"policy": "checker"} for name in TEAM["agents"]}
    settings = {"agents": team, "judge": {"policy": "main"}}
    with pytest.raises(ValueError, match="judge.policy is 'main', whose engines answer for agents.solver too"):
        config(BASED, {**MAIN, "frozen": True}, **settings)


def test_a_base_that_a_shipped_preset_alone_names_is_kept() -> None:
    found, _ = read_config(None, ["preset=cpu_adapters"])
    assert list(found.trained_policies) == ["solver", "verifier1", "corrector1", "verifier2", "corrector2"]
    assert {found.policies[name].base for name in found.trained_policies} == {"main"}
