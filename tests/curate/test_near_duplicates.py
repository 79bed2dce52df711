"""MinHash finds near-duplicate questions; all other questions are kept."""

from __future__ import annotations

from itertools import combinations

import pytest
from curation import rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from marsrl.commands.curate.near_duplicates import (
    as_compared,
    bands_and_rows,
    jaccard,
    near_duplicates,
    shingled,
)
from marsrl.commands.curate.rows import Decision, Row
from marsrl.trainer.config.curate import NearDuplicatesConfig


def decisions(asked: list[Row], **more: float) -> list[Decision]:
    return [decision for _, decision in near_duplicates(NearDuplicatesConfig(**more)).decide(iter(asked))]


def similarity(one: str, other: str) -> float:
    return jaccard(*(frozenset(shingled(as_compared(text), 5)) for text in (one, other)))


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
def test_case_blanks_and_unicode_forms_make_no_new_question(other: str) -> None:
    (_, decision) = decisions(rows_of(["What is the sum of one and two?", other]))
    assert (decision.is_kept, decision.kind) == (False, "near duplicate")
    assert decision.detail == "similarity 1.00 to raw.jsonl:1, whose answer differs"


def test_the_threshold_applies_to_the_jaccard_similarity() -> None:
    one, other = "a question about matrices of rank two", "a question about matrices of rank ten"
    between = similarity(one, other)
    rows = rows_of([one, other])
    assert [v.is_kept for v in decisions(rows, threshold=between)] == [True, False]
    assert [v.is_kept for v in decisions(rows, threshold=between + 0.01)] == [True, True]


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.8, 0.85, 0.95, 1.0])
def test_most_similar_pairs_are_found_at_any_threshold(threshold: float) -> None:
    bands, rows = bands_and_rows(threshold)
    assert bands * rows <= 126 and 1 - (1 - threshold**rows) ** bands >= 0.95
    if threshold == 0.8:
        assert (bands, rows) == (18, 7)
