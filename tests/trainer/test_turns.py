"""Credit by turn: a turn's advantage, the tokens that get it, and settings that are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from letters import sampled

from marsrl.rollout.agents import returned
from marsrl.rollout.config import AgentConfig, TeacherConfig
from marsrl.rollout.types import Fate, Finish, Group, Reward, Sample, Turn
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import Credited, credit, outcome_rewards
from marsrl.trainer.data.turns import turn_metrics

RULES = CreditConfig(std="none", turns="returns")
AGENTS = {"solver": AgentConfig()}


def of_turns(index: int, *rewards: float, last: float = 0.0, **parts: float) -> Sample:
    """Return a session of turns with these rewards. A turn has two tokens, and a foreign token separates turns. last: the rest of
    the sample's reward, which belongs to the last turn.
    """
    num_tokens = 3 * len(rewards) - 1
    reward = Reward(sum(rewards) + last + sum(parts.values()), 1.0, parts, turns=rewards)
    is_sampled = np.arange(num_tokens) % 3 < 2
    return replace(sampled(f"0/solver:{index}", 0, tokens=num_tokens), reward=reward, is_sampled=is_sampled)


def credited(*samples: Sample, rules: CreditConfig = RULES, agent: AgentConfig | None = None, **more: Any) -> Credited:
    group = Group("0/solver", "0", "solver", samples)
    return credit([group], rules, {"solver": agent or AgentConfig()}, **more)


def test_a_turn_earns_its_return_less_that_of_other_samples() -> None:
    result = credited(of_turns(0, 1.0, 2.0), of_turns(1, 0.0, 0.0, last=4.0), of_turns(2, 5.0))
    # Returns to go: 3, 2; 4, 4; 5. The baseline of a first turn is the mean return of the other samples. The baseline of a second
    # turn is the mean, over the other samples, of their returns to go at the second turn. A sample without a second turn enters
    # with the mean return of the others minus this sample's past rewards.
    expected = [[3 - 4.5, 2 - (4 + 4.5 - 1) / 2], [4 - 4, 4 - (2 + 4 - 0) / 2], [5 - 3.5]]
    assert list(result.turns.values()) == [pytest.approx(each, abs=1e-12) for each in expected]
    # A sample's advantage is that of its turn farthest from 0.
    assert list(result.advantages.values()) == pytest.approx([-1.75, 1, 1.5])
    first = result.sequences[0].token_advantages
    assert first is not None and first.tolist() == pytest.approx([-1.5, -1.5, 0, -1.75, -1.75])
    metrics = turn_metrics([(sample, result.turns[sample.uid]) for sample in result.groups[0].samples])
    assert metrics["turns/solver/number"] == pytest.approx(5 / 3)
    assert metrics["turns/solver/advantage_std"] == pytest.approx(np.std([*expected[0], *expected[1], *expected[2]]))
    assert result.of(["solver"]).turns == result.turns and not result.of(["verifier1"]).turns


def test_without_turns_of_their_own_samples_get_leave_one_out() -> None:
    samples = [sampled(f"0/solver:{i}", reward) for i, reward in enumerate([1, 0, 0.5, math.nan])]
    by_turn, by_sample = credited(*samples), credited(*samples, rules=CreditConfig(std="none"))
    assert by_turn.advantages == pytest.approx(by_sample.advantages, abs=1e-6) and len(by_turn.advantages) == 3


def test_sessions_with_equal_rewards_are_not_trained() -> None:
    samples = [of_turns(i, 0.1, 0.2, last=0.7) for i in range(5)]
    found = credited(*samples)
    assert not found.sequences and set(found.advantages.values()) == {0.0} and len(found.counted) == 5


@pytest.mark.parametrize(("singleton", "expected"), [("zero", [0, 0]), ("raw", [3, 2])])
def test_a_session_alone_follows_singleton(singleton: Any, expected: list[float]) -> None:
    rules = CreditConfig(std="none", turns="returns", singleton=singleton)
    found = credited(of_turns(0, 1, 2), of_turns(1, math.nan, 1), rules=rules)
    assert found.turns == {"0/solver:0": expected}


def test_penalties_belong_to_the_last_turn_of_their_sample() -> None:
    late = of_turns(0, 1.0, 0.0, format=-0.5)
    assert credited(late, of_turns(1, 0.0, 0.0)).turns["0/solver:0"] == pytest.approx([0.5, -0.5 - (0 + 0 - 1) / 2])
    turns = (Turn(1, 0, 2, Finish.STOP), Turn(2, 3, 5, Finish.STOP, Fate.UNREAD))
    first = replace(of_turns(0, 1.0, format=-0.5), uid="0.0/solver:0", turns=turns[:1])
    again = replace(of_turns(0, 2.0, last=4.0), uid="0.0/solver#1:0", turns=(Turn(3, 0, 2, Finish.STOP),))
    nothing = Reward(0.0, 0.0, turns=(0.0,))  # the second answer was never read
    other = replace(of_turns(0, 0.0, 0.0), uid="0.1/solver:0", turns=turns, reward=nothing)
    found = credited(again, first, other).turns
    assert found["0.0/solver:0"] == [6.5] and found["0.1/solver:0"] == [-6.5]
    assert found["0.0/solver#1:0"] == pytest.approx([6 - (0 - 0.5)])


def test_the_gate_needs_every_turn_above_its_baseline() -> None:
    found = credited(of_turns(0, 0.0, 2.0), of_turns(1, 3.0, 0.0), of_turns(2, 0.0, 0.0))
    assert [min(turns) > 0 for turns in found.turns.values()] == [True, False, False]
    assert max(found.turns["0/solver:1"]) > 0
    assert [sequence.is_positive for sequence in found.sequences] == [True, False, False]


def test_loss_weight_scales_turns_but_no_teachers_part() -> None:
    agent = AgentConfig(loss_weight=0.5, teacher=TeacherConfig(policy="big"))
    known = {"0/solver:0": np.full(5, -0.25, np.float32)}
    found = credited(of_turns(0, 1.0, 2.0), of_turns(1, 0.0, 0.0), agent=agent, teacher_logprobs=known)
    turns = found.turns["0/solver:0"]
    expected = [turns[0] / 2 - 0.25, turns[0] / 2 - 0.25, 0, turns[1] / 2 - 0.25, turns[1] / 2 - 0.25]
    tokens = found.sequences[0].token_advantages
    assert tokens is not None and tokens.tolist() == pytest.approx(expected)


def test_the_order_of_samples_changes_no_turn() -> None:
    samples = [of_turns(i, *np.random.default_rng(i).normal(size=1 + i % 3), last=0.1 * i) for i in range(7)]
    assert credited(*samples).turns == credited(*samples[::-1]).turns


def test_outcomes_keep_the_rewards_of_turns() -> None:
    sample = replace(of_turns(0, -0.5, 0.0, last=1.0), outcome=0.25)
    sample = replace(sample, reward=replace(sample.reward, parts={"turns": -0.5, "answer": 1.0}))
    (group,) = outcome_rewards([Group("0/solver", "0", "solver", (sample,))])
    expected = Reward(-0.25, 0.25, {"outcome": 0.25, "turns": -0.5}, turns=(-0.5, 0.0))
    assert group.samples[0].reward == expected


@pytest.mark.parametrize("setting", ["credit.std=biased", "credit.normalise=global", "credit.normalise=trajectory"])
def test_settings_that_bias_turns_are_refused(setting: str) -> None:
    words = ["orchestration=solver_verifier", "credit.std=none", "credit.turns=returns"]
    with pytest.raises(
        ValueError, match="credit.turns=returns needs credit.std=none and credit.normalise=group or agent"
    ):
        read_config(None, [*words, setting])


def test_means_of_sequences_refuse_credit_by_turn() -> None:
    words = ["credit.std=none", "credit.turns=returns", "loss.aggregation=sequence"]
    with pytest.raises(ValueError, match="set loss.aggregation=token or sequence_sum_constant"):
        read_config(None, words)
    read_config(None, [*words[:2], "loss.aggregation=token"])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1.0], "expected 2 rewards, one for each turn of 0/solver:0, or none, found 1"),
        ([1.0, "2"], "the reward of turn 2 to be a number"),
        ([1.0, math.inf], "the reward of turn 2 to be finite"),
        ({"a": 1.0}, "expected a list of numbers"),
    ],
)
def test_a_teams_rewards_of_turns_are_checked(value: object, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        returned.turn_rewards(value, of_turns(0, 0.0, 0.0))
