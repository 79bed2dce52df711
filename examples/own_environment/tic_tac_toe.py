"""Your own environment: tic-tac-toe, played by two agents against each other."""

import random

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


class TicTacToe:
    """Game on fields 0 to 8, row by row. A move is the last word of a player's answer."""

    max_tokens = 40  # maximum tokens of a turn

    def reset(self, problem):
        fields = "".join(random.Random(problem.id).sample("012345678", 4))
        self.moves = {"x": fields[:2], "o": fields[2:]}  # the opening, the same in all games of a problem
        return {"x": self.board("x")}

    def step(self, text):
        player, other = ("x", "o") if len(self.moves["x"]) == len(self.moves["o"]) else ("o", "x")
        move = (text.split() or [""])[-1]
        if move not in self.free():
            return {player: -1.0, other: 0.0}
        self.moves[player] += move
        if any(set(line) <= set(self.moves[player]) for line in LINES):
            return {player: 1.0, other: 0.0}
        return {other: self.board(other)} if self.free() else 0.5

    def free(self):
        return [field for field in "012345678" if field not in self.moves["x"] + self.moves["o"]]

    def board(self, player):
        return f"You play {player} . Free fields: {' '.join(self.free())}"
