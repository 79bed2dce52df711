"""Requests that no engine can serve, and each request's share of an engine's time."""

from __future__ import annotations

import numpy as np
import pytest

from marsrl.rollout.engines.protocol import DecodeRequest, Sampling, why_not_decodable
from marsrl.rollout.engines.time_shares import TimeShares


@pytest.mark.parametrize(
    ("tokens", "most", "reason"),
    [
        ([5, 6], 1, ""),
        ([], 1, "the prompt is empty"),
        ([1] * 8, 1, "the prompt has 8 tokens, which leaves no room in max_model_len 8"),
        ([1] * 7, 1, ""),
        ([5], 0, "max_new_tokens is 0"),
        ([5, 10], 1, "a token id is outside of the vocabulary of 10"),
        ([-1, 5], 1, "a token id is outside of the vocabulary of 10"),
    ],
)
def test_what_nothing_can_follow_is_refused_with_a_reason(tokens: list[int], most: int, reason: str) -> None:
    request = DecodeRequest("a", np.array(tokens, np.int32), most, Sampling(), seed=0, affinity="a")
    assert why_not_decodable(request, 8, 10) == reason


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
