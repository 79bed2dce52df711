"""Tic-tac-toe from textarena, played by two agents against each other. `pip install 'marsrl[textarena]'`"""

from marsrl.rollout.gateway.textarena_games import Game


class TicTacToe(Game):
    game = "TicTacToe-v0"
    max_tokens = 48  # maximum tokens of a turn
