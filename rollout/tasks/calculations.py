"""Calculations of two whole numbers, 7 times 8: questions for a team that has Python. All numbers are below 100, a word each."""

from __future__ import annotations

import random
from dataclasses import dataclass

from marsrl.rollout.types import Problem

_SIGNS = {"plus": "+", "minus": "-", "times": "*"}
_ID = "calculation"

WORDS = (*_SIGNS, *_SIGNS.values(), *map(str, range(100)))
"""Every word of questions, programs and answers about them, beside those of linked facts."""


@dataclass(frozen=True, slots=True)
class Calculation:
    """left and right of an operator (plus, minus, times)."""

    left: int
    operator: str
    right: int

    @classmethod
    def draw(cls, rng: random.Random) -> Calculation:
        operator = rng.choice(tuple(_SIGNS))
        if operator == "plus":
            return cls(rng.randint(1, 49), operator, rng.randint(1, 49))
        if operator == "minus":
            left = rng.randint(2, 99)
            return cls(left, operator, rng.randint(1, left - 1))
        return cls(rng.randint(2, 9), operator, rng.randint(2, 9))

    @classmethod
    def of(cls, problem: Problem) -> Calculation | None:
        """The one that a problem asks for; None where it asks for something else."""
        kind, _, rest = problem.id.partition("/")
        if kind != _ID:
            return None
        left, operator, right = rest.split("/")
        return cls(int(left), operator, int(right))

    @property
    def code(self) -> str:
        """In Python."""
        return f"{self.left} {_SIGNS[self.operator]} {self.right}"

    @property
    def value(self) -> int:
        if self.operator == "plus":
            return self.left + self.right
        return self.left - self.right if self.operator == "minus" else self.left * self.right

    def problem(self, is_terse: bool) -> Problem:
        asked = f"{self.left} {self.operator} {self.right} ?"
        question = asked if is_terse else f"what is {asked}"
        return Problem(f"{_ID}/{self.left}/{self.operator}/{self.right}", question, str(self.value), "qa")
