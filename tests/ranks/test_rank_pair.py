"""A job that fails is told by name to those who asked for it, and no other test suffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_pair import RankPair

JOB = """
import os, sys, time

def job(way, number):
    print("this is no answer")
    rank = int(os.environ["RANK"])
    if way == "raises" and rank == 1:
        raise ValueError("found nothing")
    if way == "ends" and rank == 1:
        sys.stderr.write("last words")
        os._exit(3)
    if way != "answers":
        time.sleep(3600)  # as in a collective without the other rank
    return [rank, os.environ["WORLD_SIZE"], number, os.getppid()]
"""


@pytest.fixture
def pair() -> Iterator[RankPair]:
    pair = RankPair()
    yield pair
    pair.close()


@pytest.mark.parametrize(
    ("way", "limit_s", "says"),
    [
        ("raises", 600.0, "job of made_up.py on two ranks: rank 1 raised.*ValueError: found nothing"),
        ("ends", 600.0, "job of made_up.py on two ranks: rank 1 ended with exit code 3.*last words"),
        ("hangs", 0.01, r"job of made_up.py on two ranks: no answer of rank \[0, 1\] in"),
    ],
)
def test_a_job_that_fails_is_named_and_the_next_one_goes_on(
    way: str, limit_s: float, says: str, pair: RankPair, tmp_path: Path
) -> None:
    file = tmp_path / "made_up.py"
    file.write_text(JOB)
    first = pair.run(file, {"way": "answers", "number": 0.1})
    assert first[:3] == [0, "2", 0.1]
    assert pair.run(file, {"way": "answers", "number": 2}) == [0, "2", 2, first[3]]  # forked from the same process
    with pytest.raises(RuntimeError, match=f"(?s){says}"):
        pair.run(file, {"way": way, "number": 3}, limit_s=limit_s)
    assert pair.run(file, {"way": "answers", "number": 4})[:3] == [0, "2", 4]
