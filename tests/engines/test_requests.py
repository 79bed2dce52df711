"""Each request's share of an engine's time."""

from __future__ import annotations

import pytest

from marsrl.rollout.engines.time_shares import TimeShares


def test_a_step_is_shared_by_those_in_it_and_one_that_waits_for_a_slot_pays_nothing() -> None:
    shares = TimeShares(slots=2)
    for uid in ("a", "b", "c", "d"):
        shares.add(uid)
    shares.step(0.2)  # a, b
    assert shares.end("a") == pytest.approx(0.1)
    assert shares.end("d") == 0  # never had a slot
    shares.step(0.4)  # b, c
    assert shares.end("b") == pytest.approx(0.1 + 0.2)
    shares.step(0.5)  # c
    assert shares.end("c") == pytest.approx(0.2 + 0.5)
    shares.step(9.0)  # nobody's
    shares.add("e")
    shares.step(0.25)
    assert shares.end("e") == 0.25 and shares.end("stranger") == 0
