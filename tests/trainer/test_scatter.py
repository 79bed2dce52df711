"""The batch on its way from rank 0: every rank gets its share and no more, and a failure is everybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_pair import RankPair


@pytest.fixture(scope="module")
def found(two_ranks: RankPair) -> list[dict[str, Any]]:
    """By rank."""
    return two_ranks.run(Path(__file__).with_name("scatter_worker.py"), {})  # type: ignore[no-any-return]


def test_each_rank_gets_what_it_would_have_packed_of_the_whole_batch(found: list[dict[str, Any]]) -> None:
    for own in found:
        shares = {name: equal for name, equal in own.items() if isinstance(equal, list)}
        assert len(shares) == 2 * 4 * 2 + 4 + 1
        assert [name for name, equal in shares.items() if not all(equal)] == []


def test_no_rank_holds_more_than_micro_batches_beside_its_share(found: list[dict[str, Any]]) -> None:
    first, other = (own["memory"] for own in found)
    assert first["sequences"] + other["sequences"] == 24
    room = 1.3 * first["micro_batch"]  # tokens, log-probs and the like come with the experts
    for own in (first, other):
        assert own["largest"] < room  # of tensors
        assert 0 < own["sent"] <= own["most_sent"]
    # of everything: both ranks' encoded parts and its own part received, then its part decoded and laid end to end
    assert first["beside"] < 5 * room < first["batch"] / 3
    assert other["beside"] < 3 * room


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("pack fails on rank 0", "rank 0: MemoryError: no room for pack"),
        ("pack fails on rank 1", "rank 1: MemoryError: no room for pack"),
        ("encode fails on rank 0", "rank 0: MemoryError: no room for encode"),
        ("too long", "rank 0: ValueError: packing: a sequence has 65 tokens"),
    ],
)
def test_where_one_rank_fails_all_raise_and_the_next_batch_arrives(
    name: str, says: str, found: list[dict[str, Any]]
) -> None:
    for own in found:
        assert own[name].startswith("RuntimeError: scatter: ") and says in own[name]
        assert own["after all"] == [True]
