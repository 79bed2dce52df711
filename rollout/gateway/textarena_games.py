"""Games of textarena as environments; needs marsrl's extra `textarena`. See docs/external.md.

class TicTacToe(Game):
    game = "TicTacToe-v0"
    max_tokens = 40
"""

from __future__ import annotations

import difflib
import threading
import zlib
from types import SimpleNamespace
from typing import Any, ClassVar

from marsrl.rollout.imports import check_installed

_RESETS = threading.Lock()  # textarena seeds Python's global generator, which all sessions of a worker share


class Game:
    """Game whose players are the agents, one or more, in the order of the section `agents`. Each gets a reward from -1 to 1."""

    game: ClassVar[str]
    """name of the game in textarena"""
    options: ClassVar[dict[str, Any]] = {}
    """settings that replace the game's own ({"max_number": 50})"""

    def __init_subclass__(cls) -> None:
        check_installed(f"the game {cls.__name__}", "textarena", extra="textarena")
        from textarena.envs.registration import ENV_REGISTRY

        if cls.game not in ENV_REGISTRY:
            near = ", ".join(difflib.get_close_matches(cls.game, ENV_REGISTRY, cutoff=0))
            raise ValueError(f"{cls.__name__}.game is {cls.game!r}; expected a game of textarena; the closest: {near}")

    def reset(self, problem: SimpleNamespace) -> dict[str, str]:
        import textarena

        self._agents = problem.agents
        self._moves = self._rules = textarena.make(self.game, **self.options)  # moves go through the game's wrappers
        while isinstance(self._rules, textarena.Wrapper):
            self._rules = self._rules.env
        with _RESETS:
            self._moves.reset(num_players=len(self._agents), seed=zlib.crc32(problem.id.encode()))
        return self._heard()

    def step(self, text: str) -> dict[str, str] | dict[str, float]:
        is_over, _ = self._moves.step(action=text)
        if not is_over:
            return self._heard()
        rewards, _ = self._moves.close()
        return {self._agents[player]: float(reward) for player, reward in rewards.items()}

    def _heard(self) -> dict[str, str]:
        """Return messages that the current player has not read, without its own moves."""
        player, seen = self._rules.get_observation()
        texts = [text if sender < 0 else f"[Player {sender}] {text}" for sender, text, _ in seen if sender != player]
        return {self._agents[player]: "\n".join(texts).strip() or "It is your turn."}
