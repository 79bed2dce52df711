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


def test_where_one_rank_fails_all_raise_and_the_next_batch_arrives(found: list[dict[str, Any]]) -> None:
    for own in found:
        assert own["too long"].startswith("RuntimeError: scatter: ") and own["after all"] == [True]
        assert "rank 0: ValueError: packing: a sequence has 65 tokens" in own["too long"]
