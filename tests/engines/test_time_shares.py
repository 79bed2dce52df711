"""Whose an engine's time is: every second of it is one request's, or shared by those that were decoded in it."""

from __future__ import annotations

import random

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


@pytest.mark.parametrize("slots", [None, 1, 7])
def test_the_parts_add_up_to_what_the_engine_worked(slots: int | None) -> None:
    rng, shares, under_way, worked, told = random.Random(3), TimeShares(slots), list[str](), 0.0, 0.0
    for i in range(2000):
        if rng.random() < 0.4:
            under_way.append(f"{i}")
            shares.add(under_way[-1])
        if under_way:
            seconds = rng.random()
            shares.step(seconds)
            worked += seconds
        if under_way and rng.random() < 0.5:
            told += shares.end(under_way.pop(rng.randrange(len(under_way))))
    assert told + sum(shares.end(uid) for uid in under_way) == pytest.approx(worked)
