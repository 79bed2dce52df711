"""Games of textarena as environments: what each player reads, each player's reward, and wrong names."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marsrl.rollout.gateway.textarena_games import Game
from marsrl.rollout.gateway.worker import environment_of

needs_textarena = pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="textarena is missing")
GAMES = """
from marsrl.rollout.gateway.textarena_games import Game

class TicTacToe(Game):
    game, max_tokens = "TicTacToe-v0", 40

class Guess(Game):
    game, options = "GuessTheNumber-v0", {"max_number": 5}
"""


class Players:
    """A client whose agents make these moves in turn."""

    def __init__(self, agents: list[str], moves: list[str]) -> None:
        self.agents, self.moves = agents, iter(moves)
        self.heard: dict[str, list[Any]] = defaultdict(list)

    def chat(self, agent: str, messages: list[Any], max_tokens: int | None) -> SimpleNamespace:
        self.heard[agent] = [each if isinstance(each, str) else "its move" for each in messages]
        text = next(self.moves)
        return SimpleNamespace(text=text, message={"role": "assistant", "content": text})


def played(folder: Path, name: str, agents: list[str], moves: list[str]) -> tuple[dict[str, float], Players]:
    (folder / "games.py").write_text(GAMES)
    players = Players(agents, moves)
    play = environment_of(f"{folder}/games.py:{name}")
    result = play(SimpleNamespace(id="train/7", question="", answer=None), players, lambda end: None)
    assert result.turn_rewards == {}
    return result.end, players


@needs_textarena
def test_two_agents_play_each_other_and_have_own_rewards(tmp_path: Path) -> None:
    rewards, players = played(tmp_path, "TicTacToe", ["nought", "cross"], ["[4]", "4", "[0]", "[1]", "[2]", "[7]"])
    assert rewards == {"nought": 1.0, "cross": -1.0}  # cells 4, 1 and 7 win against 0 and 2
    first, second = players.heard["nought"], players.heard["cross"]
    assert next(text for text in first if text != "its move").startswith("You are Player 0 in Tic Tac Toe.")
    assert first.count("its move") == 2 and not any("[Player 0] " in text for text in first)
    # Brackets are added to the move 4; the move is invalid because its cell is taken.
    assert "[Player 0] [4]" in second[0] and "invalid move" in second[2]
    assert "[Player 0] [1]" in second[4] and "You are Player 1" not in second[4]  # rules are shown once


@needs_textarena
def test_one_agent_plays_the_same_game_for_the_same_problem(tmp_path: Path) -> None:
    moves = [f"[{number}]" for number in range(1, 6)]
    rewards, players = played(tmp_path, "Guess", ["solver"], moves)
    assert rewards == {"solver": 1.0} and "between 1 and 5" in players.heard["solver"][0]
    assert "higher" in players.heard["solver"][-1]
    assert played(tmp_path, "Guess", ["solver"], moves)[1].heard == players.heard


@needs_textarena
def test_a_game_that_textarena_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Go.game is 'TicTacTo-v0'; .*: TicTacToe-v0"):
        type("Go", (Game,), {"game": "TicTacTo-v0"})


def test_a_game_names_the_package_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"the game Go needs textarena, .*\(marsrl\[textarena\]\)"):
        type("Go", (Game,), {"game": "TicTacToe-v0"})
