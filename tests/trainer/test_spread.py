"""Groups with spread (unequal rewards): which ones count for rollout.refill and data.rest, and settings under which none can."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from letters import group_of, sampled

from marsrl.rollout.player.refill import Spread
from marsrl.rollout.types import Group, Reward
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import credit, spread

NONE, FORM, TASK, UNKNOWN = Spread.NONE, Spread.FORM, Spread.TASK, Spread.UNKNOWN
TRAINED = ("solver",)


def penalised(*rewards: tuple[float, dict[str, float]]) -> Group:
    """Return a group whose samples have these pairs (reward of the task, penalties by name)."""
    samples = (
        replace(sampled(f"0/solver:{i}", 0), reward=Reward(value + sum(parts.values()), value, parts))
        for i, (value, parts) in enumerate(rewards)
    )
    return Group("0/solver", "0", "solver", tuple(samples))


def spread_in(*groups: Group, trained: tuple[str, ...] = TRAINED, **rules: Any) -> Spread:
    return spread(groups, CreditConfig.model_validate(rules), trained)


@pytest.mark.parametrize("rules", [{}, {"std": "none"}, {"std": "none", "turns": "returns"}, {"normalise": "agent"}])
def test_spread_is_that_of_rewards_without_penalties_of_form(rules: dict[str, str]) -> None:
    right, wrong, bare = (1.0, dict[str, float]()), (0.0, dict[str, float]()), {"format": -0.1}
    assert spread_in(penalised(right, wrong, wrong), **rules) is TASK
    assert spread_in(penalised(wrong, wrong, wrong), **rules) is NONE
    assert spread_in(penalised(wrong, wrong, (0.0, bare)), **rules) is FORM
    assert spread_in(penalised(right, (1.0, {"overlong": -0.7}), (1.0, {"overlong": -0.3} | bare)), **rules) is FORM
    rounded = penalised((0.9, {}), (0.9, {"overlong": -0.2}))  # 0.9 - 0.2 + 0.2 is not 0.9
    assert spread_in(rounded, **rules) is FORM
    assert spread_in(penalised((0.3, bare), (0.3, bare)), **rules) is NONE
    hidden = penalised((1.0, {"overlong": -1.0}), wrong)  # the penalty makes them equal
    assert (
        spread_in(hidden, **rules) is TASK
        and not credit([hidden], CreditConfig.model_validate(rules), {}).advantages["0/solver:0"]
    )


def test_missing_rewards_leave_a_flat_group_unknown() -> None:
    assert spread_in(group_of("0/solver", [1, 1, math.nan])) is UNKNOWN and spread_in() is UNKNOWN
    assert spread_in(group_of("0/solver", [1, 0, math.nan])) is TASK


def test_only_agents_that_are_trained_on_rewards_have_spread() -> None:
    groups = [group_of("0/solver", [1, 1]), group_of("0/solver:0/verifier1", [1, 0], "verifier1")]
    assert spread_in(*groups) is NONE and spread_in(*groups, trained=("solver", "verifier1")) is TASK
    assert spread_in(*groups, normalise="global") is TASK  # the Verifiers' rewards are part of the Solver's baseline


def test_outcomes_decide_under_their_reward_scheme() -> None:
    group = group_of("0/solver", [1, 0])
    for outcomes, expected in (((1, 1), NONE), ((1, 0), TASK), ((1, math.nan), UNKNOWN)):
        samples = (replace(s, outcome=value) for s, value in zip(group.samples, outcomes, strict=True))
        assert spread_in(replace(group, samples=tuple(samples)), reward_scheme="outcome") is expected


SOLVER = ("orchestration=solver",)
REFILL = "rollout.refill.groups=6"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (REFILL, "rollout.refill.most=1.05"),
            "rollout.refill.most x rollout.prompts_per_step = 1.05 x 8, which leaves no",
        ),
        ((REFILL, "rollout.refill.most=1"), "rollout.refill.most"),
        (("rollout.refill.most=3",), "rollout.refill.groups: Field required"),
        (("rollout.refill.groups=9",), "a step has at most 8 groups with spread"),
        (
            (REFILL, "agents.solver.loss_weight=0", "credit.train_agents=solver"),
            "rollout.refill counts groups of agents that are trained on their rewards, but there are none",
        ),
        ((REFILL, "credit.normalise=step"), "credit.normalise=step compares samples of all groups"),
        (("data.rest=2",), "data.rest is 2, but task=arithmetic generates new problems"),
    ],
)
def test_settings_under_which_no_group_could_count_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(None, [*SOLVER, *words])


def test_the_first_trained_agent_or_the_instance_is_counted(tmp_path: Path) -> None:
    train = "credit.train_agents=[corrector1,verifier1]"
    config, _ = read_config(None, [REFILL])
    assert config.counted_agent == "solver" and config.rollout.most_problems == 16
    assert read_config(None, [REFILL, train])[0].counted_agent == "verifier1"
    # Each problem has two groups of verifier1, so 12 are possible.
    assert read_config(None, [train, "rollout.refill.groups=12"])[0].counted_agent == "verifier1"
    for word in ("rollout.pipeline=trajectory", "credit.normalise=agent"):
        assert read_config(None, [REFILL, word])[0].counted_agent is None
    problems = ["task=math", f"data.train={tmp_path}/problems.jsonl", "policies.main.model=/m", "data.rest=3"]
    assert read_config(None, problems)[0].data.rest == 3
    assert read_config(None, [])[0].rollout.refill is None
