"""Ranks wait for rank 0 at the store, asleep and without a limit; collectives come after."""

from __future__ import annotations

from pathlib import Path

from rank_pair import RankPair

LIMIT_S, LATE_S = 6.0, 7.0  # of a collective; how late rank 0 comes to two of five meetings


def test_a_stage_may_be_longer_than_a_collective_waits_and_who_waits_sleeps(two_ranks: RankPair) -> None:
    worker = Path(__file__).with_name("meeting_worker.py")
    first, other = two_ranks.run(worker, {"limit_s": LIMIT_S, "late_s": LATE_S})
    assert first[:5] == other[:5] == ["None", "b'batch'", "b'0 1'", "False", "None"]
    cpu_s, num_sleepers, num_keys = float(other[5]), *map(int, other[6:8])
    assert cpu_s < 0.2 * 2 * LATE_S  # a rank that polls takes all of it
    assert num_sleepers == 0 and num_keys == 0  # of meetings before the last
    print(f"a rank that waited {2 * LATE_S:g} s took {cpu_s:.3f} s of CPU")
