"""Built-in task: the last digit of a chain of + - * operations, one word per operation and one per result.

    problem   a 3 b *7 c *7 d -5 e -9
    solution  a = 3 b *7 = 1 c *7 = 7 d -5 = 2 e -9 = 3 Answer: 3

Multipliers are only 3, 7 and 9: they are invertible modulo 10, so that no slip is multiplied away.
"""

from __future__ import annotations

import random
import zlib
from concurrent.futures import Future
from dataclasses import dataclass

from marsrl.rollout.rewards.judge import known
from marsrl.rollout.tasks.config import ArithmeticOptions
from marsrl.rollout.tasks.protocol import HELD_OUT, ProblemSource, Task
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer
from marsrl.rollout.types import Problem, Reward

LETTERS = "abcdefgh"
MULTIPLIERS = ("3", "7", "9")
OPERATIONS = (
    *(f"+{digit}" for digit in range(1, 10)),
    *(f"-{digit}" for digit in range(1, 10)),
    *(f"*{digit}" for digit in MULTIPLIERS),
)
_WORDS = (
    *("\n", "=", "claim", "got", "said", "agree", "rebut"),
    *("Answer:", "Verdict:", "correct", "wrong", "grade", "fix"),
)
ARITHMETIC_TOKENIZER = WordTokenizer((*_WORDS, *"0123456789", *LETTERS, *OPERATIONS), gaps=" +", apart="\n")
"""Vocabulary of 64 words, one id each."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A start digit and operations such as "+4", "-5", "*7"."""

    start: int
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        words = [LETTERS[0], str(self.start)]
        for letter, operation in zip(LETTERS[1:], self.operations, strict=False):
            words += [letter, operation]
        return " ".join(words)

    @property
    def answer(self) -> str:
        value = self.start
        for operation in self.operations:
            value = apply(value, operation)
        return str(value)

    def problem(self) -> Problem:
        text = self.text
        return Problem(id=f"chain/{text.replace(' ', '')}", question=text, answer=self.answer, task="arithmetic")


def apply(value: int, operation: str) -> int:
    """Return the last digit of `value operation`."""
    sign, operand = operation[0], int(operation[1:])
    result = value + operand if sign == "+" else value - operand if sign == "-" else value * operand
    return result % 10


def is_held_out(question: str) -> bool:
    """Return True for a tenth of all questions, which are never trained on."""
    return zlib.crc32(question.encode()) % 10 == 0


def draw_chain(rng: random.Random, options: ArithmeticOptions, held_out: bool) -> Chain:
    """Draw a chain of the training split, or of the held-out one."""
    while True:
        signs = [rng.choice("+-*") for _ in range(rng.randint(options.min_operations, options.max_operations))]
        operations = tuple(s + (rng.choice(MULTIPLIERS) if s == "*" else str(rng.randint(1, 9))) for s in signs)
        chain = Chain(rng.randrange(10), operations)
        if is_held_out(chain.text) == held_out:
            return chain


def arithmetic_task(options: ArithmeticOptions) -> Task:
    """Build the task of chains, with exact judgement: an answer is the right digit or wrong."""

    def problems(seed: int) -> ProblemSource:
        return lambda n: draw_chain(random.Random(f"arithmetic/{seed}/{n}"), options, held_out=False).problem()

    def held_out(num_problems: int | None, seed: int) -> list[Problem]:
        rng = random.Random(f"arithmetic/held-out/{seed}")
        number = HELD_OUT if num_problems is None else num_problems
        return [draw_chain(rng, options, held_out=True).problem() for _ in range(number)]

    return Task("arithmetic", "chain", problems, held_out, _judge)


def _judge(problem: Problem, answer: str) -> Future[Reward]:
    right = float(answer == problem.answer)
    return known(Reward(right, right, {"answer": right}))
