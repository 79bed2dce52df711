"""Exact expected gradients of a toy game with two turns: credit by turn is unbiased, published estimators are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import turn_credit
from turn_credit import ESTIMATORS, Estimator, moments, samples_of

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group, Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit

AGENTS = {"solver": AgentConfig()}


def in_one_sample(sample: Sample) -> list[Sample]:
    return [sample]


def of_a_team(sample: Sample) -> list[Sample]:
    """Return the whole session as one sample without turns, as a native team's."""
    return [replace(sample, turns=())]


def in_two_samples(sample: Sample) -> list[Sample]:
    """Return two samples: the program's second call begins a new one."""
    first = replace(sample, turns=sample.turns[:1], reward=replace(sample.reward, turns=sample.reward.turns[:1]))
    if len(sample.turns) == 1:
        return [first]
    rest = replace(sample.reward, value=sample.reward.value - sample.reward.turns[0], turns=())
    second = replace(sample, uid=sample.uid.replace("solver", "solver#1"), turns=sample.turns[1:], reward=rest)
    return [second, first]


def by_credit(split: Any, normalise: Any) -> Estimator:
    """Return the estimator that computes advantages by the trainer's own code."""

    def estimate(sessions: Any) -> list[list[float]]:
        group = samples_of(sessions)
        cut = [split(sample) for sample in group.samples]
        groups = [Group("0/solver", "0", "solver", tuple(each for own in cut for each in own))]
        rules = CreditConfig(normalise=normalise, std="none", turns="returns")
        turns = credit(groups, rules, AGENTS).turns
        return [[a for each in sorted(own, key=lambda s: "#" in s.uid) for a in turns[each.uid]] for own in cut]

    return estimate


@pytest.mark.parametrize("num_sessions", [2, 3, 4])
@pytest.mark.parametrize("split", [in_one_sample, of_a_team, in_two_samples])
@pytest.mark.parametrize("normalise", ["group", "agent"])
def test_the_expected_gradient_is_the_gradient(num_sessions: int, split: Any, normalise: str) -> None:
    found, _ = moments(by_credit(split, normalise), num_sessions)
    assert found == pytest.approx([1, 1], abs=1e-12)


@pytest.mark.parametrize("num_sessions", [2, 3, 4])
def test_undivided_sample_credit_is_unbiased_too(num_sessions: int) -> None:
    def estimate(sessions: Any) -> list[list[float]]:
        group = samples_of(sessions)
        found = credit([group], CreditConfig(std="none"), AGENTS).advantages
        return [[found[sample.uid]] * len(sample.turns) for sample in group.samples]

    assert moments(estimate, num_sessions)[0] == pytest.approx([1, 1], abs=1e-5)  # advantages are float32


def test_published_estimators_are_biased_as_the_page_says() -> None:
    expected = {
        "group mean and std": [-0.67, 1.5],
        "means by turn, summed": [-0.17, 0.25],
        "mean over calls": [0.5, 0.42],
    }
    for name, values in expected.items():
        assert moments(ESTIMATORS[name], 2)[0] == pytest.approx(values, abs=0.005), name


def test_the_study_prints_every_estimator(capsys: pytest.CaptureFixture[str]) -> None:
    turn_credit.table()
    lines = capsys.readouterr().out.splitlines()
    assert [line[:26].strip() for line in lines[1:-1]] == list(ESTIMATORS)
    # The variance with m turns to go is (8 / 7) (m + (6 - m) / 64). The table divides it by 6 (8 / 7) and averages over m.
    expected = sum(m + (6 - m) / 64 for m in range(1, 7)) / 36
    assert lines[-1].endswith(f"leave-one-out {expected:.2f}")
    assert lines[2].split()[1:] == ["1.00,", "1.00", "1.00,", "1.00", "0.067,", "0.066"]
