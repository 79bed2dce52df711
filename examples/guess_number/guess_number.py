"""Guess the number: an environment with state, in which fewer guesses earn more, and tutors that are often careless.

    python examples/guess_number/guess_number.py /tmp/guess_number.jsonl

writes turns of 260 games by the tutors, for `marsrl sft`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

from marsrl.rollout.tasks.own_task import OwnTask

LARGEST, MOST = 15, 4  # Halving the range finds each number within four guesses.
RULES = f"I think of a whole number from 1 to {LARGEST}. Guess it in {MOST} turns. I say Higher or Lower."


class Games(OwnTask):
    """Task with 20 training games and 7 evaluation games for each number; the environment gives the reward."""

    def problems(self):
        return [(f"game {i}", str(i % LARGEST + 1)) for i in range(20 * LARGEST)]

    def held_out(self):
        return [(f"held-out game {i}", str(i % LARGEST + 1)) for i in range(7 * LARGEST)]


class GuessNumber:
    """Game of guessing a number. The guess is the last number in an answer.

    The reward is 1 for a right first guess, and a tenth less for each further guess.
    """

    max_tokens = 16  # maximum tokens of a turn

    def reset(self, problem: SimpleNamespace) -> str:
        self.number, self.turns = int(problem.answer), 0
        return RULES

    def step(self, text: str) -> str | float:
        self.turns += 1
        guesses = re.findall(r"\d+", text)
        if guesses and int(guesses[-1][:9]) == self.number:
            return 1 - (self.turns - 1) / 10
        if self.turns == MOST:
            return 0.0
        if not guesses:
            return "That is no number."
        return "Higher" if int(guesses[-1][:9]) < self.number else "Lower"


def tutored(rng: random.Random, is_careless: bool) -> list[str]:
    """Play a game and return the texts of its chat.

    A careful tutor halves the remaining range; a careless one guesses at random.
    """
    game, low, high = GuessNumber(), 1, LARGEST
    chat = [game.reset(SimpleNamespace(answer=rng.randint(1, LARGEST)))]
    while True:
        guess = rng.randint(1, LARGEST) if is_careless else (low + high) // 2
        chat.append(f"Guess {guess}" if is_careless else f"Range {low}-{high}, middle {guess}")
        heard = game.step(chat[-1])
        if not isinstance(heard, str):
            return chat
        chat.append(heard)
        low, high = (guess + 1, high) if heard == "Higher" else (low, guess - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="demonstrations to write")
    parser.add_argument("--games", type=int, default=260)
    parser.add_argument("--careless", type=float, default=0.6, help="share of games that careless tutors play")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    rng, lines = random.Random(words.seed), list[str]()
    for _ in range(words.games):
        is_careless = rng.random() < words.careless
        chat = tutored(rng, is_careless)
        ends = list(range(2, len(chat) + 1, 2))  # `marsrl sft` trains the last turn of each line
        if is_careless:
            ends = sorted({ends[0], rng.choice(ends)})
        for end in ends:
            turns = [{"role": ("user", "assistant")[i % 2], "content": chat[i]} for i in range(end)]
            lines.append(json.dumps({"agent": "player", "messages": turns}))
    rng.shuffle(lines)
    words.file.write_text("".join(f"{line}\n" for line in lines))
    print(f"{words.file}: {len(lines)} turns of {words.games} games")


if __name__ == "__main__":
    main()
