"""The planner against steps, updates and decoding speeds that others have published (published.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from marsrl.trainer.config.read import read_config
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.plan import make_plan
from marsrl.trainer.plan.ranking import step_seconds

CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
WITHIN = 0.15


def planned_over_published(case: dict[str, Any]) -> float:
    """The planned seconds over those published; of a speed the inverse."""
    config, _ = read_config("math_default", ["orchestration=solver", *case["words"]])
    (policy,) = make_plan(config, case["gpus"], "h100-80g", case["mean_response"]).policies
    assert policy.configured is not None, policy.why_not_configured
    rollout, update = policy.rollout, policy.configured.time.total
    ((name, published),) = case["measures"].items()
    if name == "tokens_per_s":
        return published / rollout.tokens_per_s_per_engine
    if name in ("update_s", "sync_s"):
        return (update if name == "update_s" else policy.sync.total) / published
    return step_seconds([rollout.seconds], [update], [policy.sync.total], config.rollout.overlap) / published


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_a_published_case_is_planned_within_15_percent_or_the_table_says_why_not(case: dict[str, Any]) -> None:
    ratio = planned_over_published(case)
    assert (abs(ratio - 1) <= WITHIN) == ("outside" not in case), ratio


def test_a_constant_is_fitted_to_one_publication_and_three_others_are_predicted() -> None:
    publisher = {case["case"]: case["case"].split(",")[0].split()[0] for case in CASES}
    fitted: dict[str, set[str]] = {}
    for case in CASES:
        for name in case.get("fits", ()):
            fitted.setdefault(name, set()).add(publisher[case["case"]])
            assert isinstance(getattr(hw, name), hw.Constant)
            assert abs(planned_over_published(case) - 1) < 0.1  # others of its publication were fitted with it
    assert all(len(publishers) == 1 for publishers in fitted.values()) and fitted
    predicted = {publisher[case["case"]] for case in CASES if not {"fits", "outside"} & case.keys()}
    assert predicted == {"NeMo-RL", "prime-rl", "ML.ENERGY"}
