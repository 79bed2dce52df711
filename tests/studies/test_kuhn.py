"""Kuhn poker: exact exploitability, and an environment that plays the same tree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kuhn import DEALS, POINTS, Kuhn, average, chat, exploitability, payoff, value


def equilibrium(bluff: float) -> dict[tuple[int, str], float]:
    """Return the known equilibrium in which the first player bets with card 1 at this probability, and with card 3 three times as
    often.
    """
    first = {(1, ""): bluff, (2, ""): 0.0, (3, ""): 3 * bluff, (1, "01"): 0.0, (2, "01"): bluff + 1 / 3, (3, "01"): 1.0}
    second = {(1, "0"): 1 / 3, (2, "0"): 0.0, (3, "0"): 1.0, (1, "1"): 0.0, (2, "1"): 1 / 3, (3, "1"): 1.0}
    return first | second


def test_even_moves_lose_11_of_24_to_best_responses() -> None:
    assert exploitability(dict.fromkeys(POINTS, 0.5)) == pytest.approx(11 / 24, abs=1e-12)


@pytest.mark.parametrize("bluff", [0.0, 1 / 7, 1 / 3])
def test_no_response_gains_in_an_equilibrium(bluff: float) -> None:
    found = equilibrium(bluff)
    assert abs(exploitability(found)) < 1e-12
    assert sum(value(found, deal) for deal in DEALS) / 6 == pytest.approx(-1 / 18, abs=1e-12)
    assert exploitability(found | {(2, "1"): 0.5}) > 0.01


def test_an_average_plays_like_a_policy_drawn_before_the_game() -> None:
    """Only the first player draws a policy, because a payoff is linear in the plan of one player."""
    both = [equilibrium(1 / 3) | {(2, ""): 0.9, (2, "01"): 0.8}, equilibrium(0.0) | {(2, "01"): 0.1}]
    second = {point: 0.4 for point in POINTS if len(point[1]) % 2}
    for deal in DEALS:
        expected = sum(value({**each, **second}, deal) for each in both) / 2
        assert value({**average(both), **second}, deal) == pytest.approx(expected, abs=1e-12)


def test_the_environment_asks_and_pays_by_the_tree() -> None:
    def played(deal: tuple[int, int], moves: str) -> list[object]:
        game = Kuhn()
        return [game.reset(SimpleNamespace(answer=f"{deal[0]}{deal[1]}")), *map(game.step, moves)]

    for deal in DEALS:
        for moves in ("00", "10", "11", "010", "011"):
            *asked, end = played(deal, moves)
            won = payoff(deal, moves)
            assert won is not None and end == {"first": won, "second": -won}
            for turn, heard in enumerate(asked):
                card, player = deal[turn % 2], ("first", "second")[turn % 2]
                assert heard == {player: chat(card, moves[:turn])[-1]["content"]}
    assert played((3, 1), "x")[-1] == {"first": -2.0, "second": 0.0}
    assert played((3, 1), "0\n")[-1] == {"second": -2.0, "first": 0.0}
