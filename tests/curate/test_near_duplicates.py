"""MinHash finds what is much alike, and drops nothing else."""

from __future__ import annotations

import random
import string
from itertools import combinations

import pytest
from curation import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from marsrl.trainer.commands.curate.near_duplicates import as_compared, jaccard, near_duplicates, shingled
from marsrl.trainer.commands.curate.rows import Decision, Row
from marsrl.trainer.config.curate import NearDuplicatesConfig


def decisions(asked: list[Row], **more: float) -> list[Decision]:
    return [decision for _, decision in near_duplicates(NearDuplicatesConfig(**more)).decide(iter(asked))]


def similarity(one: str, other: str) -> float:
    return jaccard(*(frozenset(shingled(as_compared(text), 5)) for text in (one, other)))


def prompts(drawn: random.Random, num: int) -> list[str]:
    """Half of them edited from earlier ones."""
    words = ["".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 9))) for _ in range(300)]
    made: list[str] = []
    for _ in range(num):
        text = drawn.choice(made).split() if made and drawn.random() < 0.5 else drawn.choices(words, k=20)
        for _ in range(drawn.randrange(3)):
            text[drawn.randrange(len(text))] = drawn.choice(words)
        made.append(" ".join(text))
    return made


def test_on_random_prompts_it_agrees_with_every_pair_compared() -> None:
    """400 prompts, seed 11: nothing unlike is dropped, and of what is alike to a kept row hardly anything is missed."""
    texts = prompts(random.Random(11), 400)
    found = decisions(rows_of(texts))
    kept: list[frozenset[str]] = []
    missed = 0
    for text, decision in zip(texts, found, strict=True):
        own = frozenset(shingled(as_compared(text), 5))
        most = max((jaccard(own, other) for other in kept), default=0.0)
        if decision.is_kept:
            missed += most >= 0.8
            kept.append(own)
        else:
            assert most >= 0.8, decision
    num_dropped = len(texts) - len(kept)
    assert 80 < num_dropped < 200
    assert missed <= 0.02 * num_dropped


@settings(max_examples=30)
@given(st.lists(st.text("aAbﬁ²  \n\x00\u202e界", max_size=60), max_size=8))
def test_an_equal_question_is_dropped_whatever_it_is(texts: list[str]) -> None:
    rows = rows_of([*texts, *texts])
    found = decisions(rows)
    assert not any(decision.is_kept for decision in found[len(texts) :])
    kept = [row.problem.question for row, decision in zip(rows, found, strict=True) if decision.is_kept]
    assert all(similarity(*pair) < 0.8 for pair in combinations(kept, 2) if pair[0] == pair[1])


@pytest.mark.parametrize(
    "other",
    ["what  IS\tthe sum\nof one and two?", "Ｗhat is the sum of one and two?", "What is\x00the sum of one and two?"],
)
def test_case_white_space_and_forms_of_a_character_make_no_other_question(other: str) -> None:
    (_, decision) = decisions(rows_of(["What is the sum of one and two?", other]))
    assert (decision.is_kept, decision.kind) == (False, "near duplicate")
    assert decision.detail == "similarity 1.00 to raw.jsonl:1, which has another answer"


def test_the_first_of_a_kind_stays_and_the_most_alike_is_named() -> None:
    base = "the quick brown fox jumps over the lazy dog and runs far away into the dark green wood"
    rows = rows_of(
        [base, base.replace("dark", "deep"), "something else entirely, of other words", base + " again", base]
    )
    found = decisions(rows)
    assert [decision.is_kept for decision in found] == [True, False, True, False, False]
    assert found[4].detail.startswith("similarity 1.00 to raw.jsonl:1")


def test_of_many_candidates_the_most_alike_are_compared() -> None:
    """A template: every row is a candidate of every other, and far more than 64 are kept before the first repeats one."""
    drawn = random.Random(3)
    people = ("Ann", "Bob")
    texts = [
        f"{drawn.choice(people)} has {drawn.randrange(9999)} apples and {drawn.randrange(9999)} pears; how many are {i}?"
        for i in range(100)
    ]
    found = decisions(
        rows_of([*texts, *(text + " Say." for text in reversed(texts))]), threshold=0.9, bands=126, rows=1
    )
    assert sum(decision.is_kept for decision in found[:100]) > 80
    assert not any(decision.is_kept for decision in found[100:])


def test_the_threshold_is_of_the_similarity() -> None:
    one, other = "a question about matrices of rank two", "a question about matrices of rank ten"
    between = similarity(one, other)
    rows = rows_of([one, other])
    assert [v.is_kept for v in decisions(rows, threshold=between, bands=64, rows=3)] == [True, False]
    assert [v.is_kept for v in decisions(rows, threshold=between + 0.01, bands=64, rows=3)] == [True, True]


def test_bands_that_find_too_little_are_refused() -> None:
    assert NearDuplicatesConfig().share_found == pytest.approx(0.9855, abs=1e-4)
    with pytest.raises(ValidationError, match="find 67% of the pairs whose similarity is threshold=0.5.*raise bands"):
        NearDuplicatesConfig(threshold=0.5, bands=35, rows=5)
