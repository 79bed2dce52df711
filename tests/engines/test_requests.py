"""Requests that no engine can serve, whichever it is."""

from __future__ import annotations

import numpy as np
import pytest

from marsrl.rollout.engines.protocol import DecodeRequest, Sampling, why_not_decodable


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


def test_what_is_not_known_of_a_server_is_left_to_it() -> None:
    request = DecodeRequest("a", np.array([999] * 99, np.int32), 1, Sampling(), seed=0, affinity="a")
    assert why_not_decodable(request, None, None) == ""
