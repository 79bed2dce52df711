"""Problems in plain English that a small chat model can learn, and demonstrations of a team that slips now and then.

    python examples/real_team/problems.py /tmp/real_team

writes train.jsonl and held_out.jsonl, in which no two problems ask the same of the same numbers, and demonstrations.jsonl for
`marsrl sft`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
STORIES = {
    "sum": (
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
        "There are {a} {things} on the table and {b} in a box. How many {things} is that?",
        "{name} found {a} {things} on Monday and {b} on Tuesday. How many in all?",
    ),
    "difference": (
        "{name} has {a} {things} and gives away {b}. How many are left?",
        "Of {a} {things}, {b} are broken. How many are whole?",
        "{name} needs {a} {things} and has {b}. How many are missing?",
    ),
    "backwards": ("{name} writes the number {a} backwards. Which number is that?",),
    "sorted": ("{name} puts the digits of {a} in order, small to large. Which number is that?",),
}
SLIPS = {"solver": 0.25, "verifier": 0.1, "corrector": 0.15}
"""Chance of a slip in each operation of a tutor: RL is to remove them."""


class Story(NamedTuple):
    """A problem: what it asks for, of which numbers, in which words."""

    kind: str
    a: int
    b: int
    question: str

    @property
    def answer(self) -> int:
        return self.work(random.Random(), 0.0)[1]

    def work(self, rng: random.Random, slip: float) -> tuple[str, int]:
        """The lines of a calculation by digits, and its result; either may be wrong."""
        (tens_a, ones_a), (tens_b, ones_b) = divmod(self.a, 10), divmod(self.b, 10)

        def written(term: str, value: int) -> int:
            value = max(0, value + rng.choice((-1, 1))) if rng.random() < slip else value
            lines.append(f"{term}={value}")
            return value

        lines: list[str] = []
        if self.kind == "sum":
            ones = written(f"{ones_a}+{ones_b}", ones_a + ones_b)
            carry = ones // 10
            tens = written(f"{tens_a}+{tens_b}" + "+1" * carry, tens_a + tens_b + carry)
            return "\n".join(lines), 10 * tens + ones % 10
        if self.kind == "difference":
            borrow = int(ones_a < ones_b)
            ones = written(f"{ones_a + 10 * borrow}-{ones_b}", ones_a + 10 * borrow - ones_b)
            tens = written(f"{tens_a}-{tens_b}" + "-1" * borrow, tens_a - tens_b - borrow)
            return "\n".join(lines), 10 * tens + ones
        digits = sorted(str(self.a)) if self.kind == "sorted" else list(reversed(str(self.a)))
        for i in range(len(digits) - 1):
            if rng.random() < slip / 2:  # there are more places than operations of a sum
                digits[i], digits[i + 1] = digits[i + 1], digits[i]
        return ",".join(digits), int("".join(digits))


def stories(rng: random.Random) -> Iterator[Story]:
    """An endless stream; no two have the same numbers and kind."""
    seen = set()
    while True:
        kind = rng.choice(tuple(STORIES))
        b, a = sorted(rng.sample(range(11, 100), 2))
        if kind in ("backwards", "sorted"):
            a, b = rng.randrange(1000, 10_000), 0
            if "0" in str(a):  # a result would begin with it
                continue
        if (kind, a, b) not in seen:
            seen.add((kind, a, b))
            if kind == "sum" and rng.random() < 0.5:
                a, b = b, a
            text = rng.choice(STORIES[kind]).format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
            yield Story(kind, a, b, text)


def solution(story: Story, rng: random.Random, slip: float) -> tuple[str, int]:
    work, result = story.work(rng, slip)
    return f"{work}\n\\boxed{{{result}}}", result


def demonstrations(story: Story, rng: random.Random) -> list[dict[str, object]]:
    """Demonstrations of the Solver and the Verifier on a problem, and of the Corrector if the verdict is `wrong`."""

    def report(said: int) -> str:
        work, found = story.work(rng, SLIPS["verifier"])
        return f"{work}\nFound {found}, told {said}.\nVerdict: {'correct' if found == said else 'wrong'}"

    def line(agent: str, completion: str, **prompt: str) -> dict[str, object]:
        return {"agent": agent, "prompt": {"problem": story.question, **prompt}, "completion": completion}

    lines = [line("solver", solution(story, rng, SLIPS["solver"])[0])]
    judged, said = solution(story, rng, rng.choice((0.0, 0.7)))  # about half are right
    told = report(said)
    lines.append(line("verifier1", told, solution=judged))
    if told.endswith("wrong"):
        again = solution(story, rng, SLIPS["corrector"])[0]
        lines.append(line("corrector1", again, solution=judged, report=told))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the three files are written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=400, help="problems to train on")
    parser.add_argument("--held-out", type=int, default=200, help="problems to evaluate on")
    parser.add_argument("--taught", type=int, default=160, help="training problems with demonstrations")
    words = parser.parse_args()
    rng = random.Random(words.seed)
    stream = stories(rng)
    held_out, train = [[next(stream) for _ in range(count)] for count in (words.held_out, words.train)]
    taught = [line for story in train[: words.taught] for line in demonstrations(story, rng)]
    problems = {
        name: [{"question": story.question, "answer": str(story.answer)} for story in drawn]
        for name, drawn in (("train", train), ("held_out", held_out))
    }
    words.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {**problems, "demonstrations": taught}.items():
        (words.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{words.folder / name}.jsonl: {len(rows)} lines")


if __name__ == "__main__":
    main()
