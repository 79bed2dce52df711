"""How a weight sync compares log-probs, here made-up ones, and which rounding noise it allows for."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from marsrl.trainer.weights.comparison import EngineComparison, TrainerScores

SHAPE = (16, 40)  # sequences, log-probs
DRAW = np.random.default_rng(3)
OURS = DRAW.normal(-5, 1, SHAPE).astype(np.float32)
NOISE = DRAW.normal(0, 0.01, SHAPE).astype(np.float32)
TRAINER = TrainerScores(list(OURS), list(OURS + NOISE))


def engine(scale: float, seed: int = 0) -> np.ndarray:
    """Return an engine's log-probs, which differ from the trainer's by `scale` times the trainer's rounding errors."""
    return OURS + np.random.default_rng(seed).normal(0, 0.01 * scale, SHAPE).astype(np.float32)


def test_rounding_passes_and_reports_its_largest_difference() -> None:
    theirs = engine(1)
    theirs[3, 7] += 4  # a token with other experts
    theirs[:, 11] += 0.5
    report = EngineComparison().compare(TRAINER, [engine(0.5), theirs], 0)
    assert report.num_tokens == 640 and report.largest == pytest.approx(4, abs=0.1)
    assert report.median == pytest.approx(0.0067, rel=0.2) and report.noise == pytest.approx(0.0067, rel=0.1)
    # 90 % of a normal distribution lie within 1.645 standard deviations
    assert report.bound == pytest.approx(2 * 1.645 * 0.01, rel=0.1)
    assert report.share == pytest.approx(17 / 640, abs=0.005) and 0.7 < report.ratio < 1.4


def refusal(
    engines: list[np.ndarray], *, trainer: TrainerScores = TRAINER, comparison: EngineComparison | None = None
) -> str:
    """Return the error of comparing version 2. comparison: comparison that has seen earlier versions; None: a new one."""
    with pytest.raises(RuntimeError) as raised:
        (comparison or EngineComparison()).compare(trainer, engines, 2)
    return str(raised.value)


def test_a_median_beyond_rounding_names_bound_engine_and_token() -> None:
    theirs = engine(4)
    theirs[5, 20] += 3
    expected = (
        r"version 2: trainer and engine 1 disagree on the probe .* the median of \|difference\| over 640 tokens is "
        r"0\.02\d+ nats, expected at most 0\.0(19|20|21)\d* \(3 x .* largest difference is [23]\S* nats at sequence 5, "
        r"token 21 of 40: trainer -\d.*checksum agreed"
    )
    assert re.search(expected, refusal([engine(1), theirs]))


@pytest.mark.parametrize(
    ("passes", "fails", "says"),
    [  # tokens that differ, accepted and refused: 1/8 and 1/4 of all tokens (as by routers); 8 and 9 of the 16 last tokens
        (np.s_[:, :5], np.s_[:, :10], r"the share of the 640 tokens .* is 0\.25\d*, expected at most 0\.2"),
        (np.s_[:8, -1], np.s_[:9, -1], "9 of the 16 last tokens, .* prefix cache, differ by more than"),
    ],
)
def test_a_part_of_the_tokens_that_is_off_is_named(passes: Any, fails: Any, says: str) -> None:
    fine, off = engine(1), engine(1)
    fine[passes] += 0.1
    off[fails] += 0.1
    EngineComparison().compare(TRAINER, [fine], 0)
    assert re.search(says, refusal([off]))


def test_later_versions_are_judged_by_the_first_comparison() -> None:
    comparison, near = EngineComparison(), EngineComparison()
    comparison.compare(TRAINER, [engine(2.2)], 0)
    # The bound of a later version is never above that of the first.
    assert re.search(r"expected at most 0\.0\d+ \(3 x", refusal([engine(3.6)], comparison=comparison))
    near.compare(TRAINER, [engine(0.2)], 0)
    near.compare(TRAINER, [engine(1.6)], 1)  # the bound is never below the rounding error
    assert "(2 x" in refusal([engine(2.4)], comparison=near)
    EngineComparison().compare(TRAINER, [engine(2.4)], 2)
    exact = TrainerScores(list(OURS), list(OURS))  # without noise, float32's resolution counts
    EngineComparison().compare(exact, [OURS + np.float32(1e-6)], 0)
    assert "median" in refusal([OURS + np.float32(1e-5)], trainer=exact)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_log_probs_that_are_no_numbers_are_named_as_such(value: float) -> None:
    bad = OURS.copy()
    bad[2, 4:], bad[2, 5:] = value, np.inf
    said = refusal([engine(1)], trainer=TrainerScores(list(bad), TRAINER.rounded))
    assert f"log-probs of the probe are not finite: 36 of 40 in sequence 2, first {value} at token 5" in said
    said = refusal([engine(1), bad])
    assert re.search(r"engine 1's log-probs of the probe are not finite: .* at token 5", said) and "cache" not in said


def test_engines_that_score_other_tokens_or_none_are_named() -> None:
    assert re.search(r"engine 1 returned \[39, .* expected \[40, ", refusal([engine(1), engine(1)[:, 1:]]))
    assert "nothing to compare: found 640 tokens and 0 engines" in refusal([])


def test_a_policy_that_diverged_is_not_blamed_on_the_transfer() -> None:
    far = TrainerScores([each * 1000 for each in TRAINER.logprobs], [each * 1000 for each in TRAINER.rounded])
    said = refusal([engine(10) * 1000], trainer=far)
    assert re.search(r"trainer's own log-probs have a median of -[45]\d{3} nats, so the policy has", said)
    assert "check for stale prefix caches" in refusal([engine(10)])
