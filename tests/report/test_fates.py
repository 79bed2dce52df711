"""Fates of a step's samples, derived from the credit of made-up groups and from what an update would report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from made_up_run import make_group, make_sample

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import MISSING, Fate, Finish, Reward, Sample, Turn
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.learner.trained_tokens import TrainedSample
from marsrl.trainer.report.fates import FATES, Resting, SampleFate, fates

AGENTS = {"solver": AgentConfig(), "judge": AgentConfig(policy="frozen")}


def with_reward(uid: str, value: float, **changes: object) -> Sample:
    return replace(make_sample(uid), reward=Reward(value, value), **changes)  # type: ignore[arg-type]


def of_program(uid: str, *answers: Fate) -> Sample:
    """Return a session's sample with an answer of 2 tokens for each fate."""
    turns = tuple(Turn(i + 1, 2 * i, 2 * i + 2, Finish.STOP, fate) for i, fate in enumerate(answers))
    sample = make_sample(uid, num_tokens=2 * len(answers))
    is_read = np.repeat([fate is Fate.READ for fate in answers], 2)
    return replace(sample, turns=turns, is_sampled=is_read, reward=Reward(MISSING, MISSING))


def test_every_sample_has_the_fate_that_happened_to_it() -> None:
    right, wrong, skipped = (
        with_reward(uid, value) for uid, value in (("right", 1.0), ("wrong", 0.0), ("skipped", 0.0))
    )
    unjudged, cut = with_reward("unjudged", MISSING), with_reward("cut", 0.0, finish=Finish.LENGTH)
    alike = [replace(with_reward(f"alike{i}", 1.0), group_id="alike", rollout_id="alike") for i in range(2)]
    programs = [of_program("left", Fate.UNREAD), of_program("again", Fate.SUPERSEDED, Fate.UNREAD)]
    judge = make_sample("judge", "judge")
    groups = [
        make_group(right, wrong, skipped, unjudged, cut),
        make_group(*alike),
        make_group(*programs),
        make_group(judge),
    ]
    credited = credit(groups, CreditConfig(), AGENTS, masks_truncated=True)
    updates = [
        TrainedSample("right", 3, 0.3, True, 2),
        TrainedSample("right", 1, 0.1, True, 2),
        TrainedSample("skipped", 4, 0.4, False),
    ]
    by_uid = fates(groups, {"solver"}, credited, updates)
    assert by_uid["right"] == SampleFate("trained", 4, 4, 2, 0.1)  # sums over the sample's parts on two ranks
    assert {uid: fate.fate for uid, fate in by_uid.items()} == {
        "right": "trained", "wrong": "lost", "skipped": "update skipped", "unjudged": "no reward", "cut": "cut",
        "alike0": "zero advantage", "alike1": "zero advantage", "left": "unread", "again": "superseded",
        "judge": "not trained",
    }  # fmt: skip
    assert {fate.fate for fate in by_uid.values()} == {*FATES} - {"balanced away"}
    assert (by_uid["again"].num_sampled, by_uid["again"].num_trained) == (4, 0)


def test_samples_that_balancing_leaves_out_are_named() -> None:
    config = CreditConfig(balance="uniform")
    group = make_group(*(with_reward(f"s{i}", float(i % 2)) for i in range(4)))
    credited = credit([group], config, AGENTS, group_size=2)
    updates = [TrainedSample(sequence.uid, 4, 0.0, True) for sequence in credited.sequences]
    found = [fate.fate for fate in fates([group], {"solver"}, credited, updates).values()]
    assert sorted(found) == ["balanced away", "balanced away", "trained", "trained"]


def test_an_agent_without_a_trained_sample_is_named_once() -> None:
    groups = [make_group(make_sample("s")), make_group(make_sample("j", "judge"))]
    none, some = SampleFate("zero advantage", 4), SampleFate("trained", 4, 4)
    frozen, resting = SampleFate("not trained", 4), Resting(2)
    for fate, names in ((none, 0), (some, 0), (none, 0), (none, 1), (none, 0), (some, 0)):
        sentences = resting.found(groups, {"s": fate, "j": frozen})
        assert len(sentences) == names
        assert not names or sentences == [
            "no sample of solver was trained in 2 steps (trainer.max_empty_steps); the last step's: 1 zero advantage"
        ]
