"""The environment Toll: exact returns, sessions read back from a run's log, and a biased estimator in place of the trainer's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from statistics import pvariance
from types import SimpleNamespace

import pytest
import summed_means
import turn_credit
from toll import HINT, MOST, Toll, chat, outlook, session, variances

from marsrl.rollout.types import MISSING
from marsrl.trainer.config import CreditConfig


def played(words: str) -> tuple[list[str], list[float]]:
    """Play a session on `47`, whose answer is 7; return (what the agent reads, rewards of its turns)."""
    game, heard, rewards = Toll(), list[str](), list[float]()
    reply = game.reset(SimpleNamespace(question="47, 7", answer="7"))
    for word in words:
        heard.append(reply)
        reply, reward = found if isinstance(found := game.step(word), tuple) else (found, 0.0)
        rewards.append(reward)
        if isinstance(reply, float):
            rewards[-1] += reply
            break
    assert isinstance(reply, float), "the session goes on"
    return heard, rewards


def test_return_and_hints_are_those_of_all_sessions() -> None:
    turns = [(0.3, 0.2), (0.1, 0.6), (0.5, 0.4), (0.2, 0.3)]
    gain = hints = 0.0
    sessions = {words[: len(played(words)[0])] for words in map("".join, product(HINT + "7x", repeat=MOST))}
    for words in sessions:
        probability = 1.0
        for word, (hint, right) in zip(words, turns, strict=False):
            probability *= {HINT: hint, "7": right, "x": 1 - hint - right}[word]
        gain += probability * sum(played(words)[1])
        hints += probability * words.count(HINT)
    assert outlook(turns) == pytest.approx((gain, hints), abs=1e-12)


@pytest.mark.parametrize("words", ["7", "x", "?7", "??x", "???7", "????"])
def test_a_logged_session_has_its_rewards(words: str) -> None:
    heard, rewards = played(words)
    assert [turn["content"] for turn in chat("47", "7", len(heard) - 1) if turn["role"] == "user"] == heard
    text = "".join(word + heard for word, heard in zip(words, [*heard[1:], ""], strict=True))
    assert session(text, sum(rewards)) == pytest.approx(rewards, abs=1e-12)


def test_variances_are_of_the_named_estimators() -> None:
    found = variances([[[1.0], [-0.1, 0.0], [-0.1, 1.0]]])
    assert found["none"] == pytest.approx(pvariance([0.6, -1.05, -1.05, 0.45, 0.45]), abs=1e-12)
    assert found["turns"] == pytest.approx(pvariance([0.6, -1.05, -1.025, 0.45, 0.725]), abs=1e-12)
    assert found["summed means"] == pytest.approx(
        pvariance([11 / 15, -0.1 - 4 / 15 - 0.5, -0.5, 2 / 15, 0.5]), abs=1e-12
    )
    assert variances([[[1.0], [0.0]], [[0.5], [0.1]]])["std"] == pytest.approx(1.0, abs=1e-12)


def test_the_trainer_gets_the_estimator_of_the_table() -> None:
    sessions = [(-0.1, 1.0), (-0.1, -0.1, 0.0), (0.5,)]
    samples = turn_credit.samples_of(sessions).samples
    lost = replace(samples[0], uid="lost", reward=replace(samples[0].reward, value=MISSING))
    found = summed_means.advantages([*samples, lost], CreditConfig(std="none", turns="returns"))
    expected = turn_credit.summed_means(sessions)
    assert [found[sample.uid] for sample in samples] == [pytest.approx(own, abs=1e-12) for own in expected]
    assert len(found) == len(samples)
