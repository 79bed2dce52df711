"""Numbers to sort, in plain English, and demonstrations by tutors that are often careless.

    python examples/real_team/problems.py /tmp/real_team

writes train.jsonl and held_out.jsonl, in which no two problems have the same numbers, and demonstrations.jsonl for
`marsrl sft`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo")
QUESTIONS = (
    "{name} has the cards {cards} and lays them in order, smallest first.",
    "Put {cards} in order, smallest first.",
    "{name} sorts {cards} from small to large.",
)
CARDS = 3
CARELESS = 0.7
"""Share of careless demonstrations; RL should remove this behaviour."""


class Problem(NamedTuple):
    """Cards with two-digit numbers, to be sorted."""

    cards: tuple[int, ...]
    question: str

    @property
    def answer(self) -> str:
        """The sorted cards, written as a tuple, whose order counts: `(12, 40, 67)`."""
        return listed(sorted(self.cards))

    def solution(self, rng: random.Random) -> str:
        """Return a tutor's solution. A careless tutor leaves the cards unsorted."""
        return f"\\boxed{{{listed(self.cards)}}}" if rng.random() < CARELESS else f"Sorted: \\boxed{{{self.answer}}}"

    def report(self, solution: str, rng: random.Random) -> str:
        """Return a tutor's report on a solution. A careless tutor says correct or wrong at random."""
        if rng.random() < CARELESS:
            return f"Verdict: {rng.choice(('correct', 'wrong'))}"
        return f"Sorted: {self.answer}\nVerdict: {'correct' if self.answer in solution else 'wrong'}"


def listed(cards: Iterable[int]) -> str:
    return f"({', '.join(map(str, cards))})"


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems without end; no two have the same cards, and none are already sorted."""
    seen = set()
    while True:
        cards = tuple(rng.sample(range(10, 100), CARDS))
        if frozenset(cards) not in seen and list(cards) != sorted(cards):
            seen.add(frozenset(cards))
            words = {"name": rng.choice(NAMES), "cards": ", ".join(map(str, cards))}
            yield Problem(cards, rng.choice(QUESTIONS).format(**words))


def demonstrations(problem: Problem, rng: random.Random) -> list[dict[str, object]]:
    """Return demonstrations of the Solver and the Verifier on a problem, and of the Corrector if the verdict is `wrong`."""

    def line(agent: str, completion: str, **prompt: str) -> dict[str, object]:
        return {"agent": agent, "prompt": {"problem": problem.question, **prompt}, "completion": completion}

    lines = [line("solver", problem.solution(rng))]
    solution = problem.solution(rng)
    report = problem.report(solution, rng)
    lines.append(line("verifier1", report, solution=solution))
    if report.endswith("wrong"):
        lines.append(line("corrector1", problem.solution(rng), solution=solution, report=report))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for the three files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=400, help="problems to train on")
    parser.add_argument("--held-out", type=int, default=200, help="problems to evaluate on")
    parser.add_argument("--taught", type=int, default=200, help="training problems with demonstrations")
    words = parser.parse_args()
    rng = random.Random(words.seed)
    stream = problems(rng)
    held_out, train = [[next(stream) for _ in range(count)] for count in (words.held_out, words.train)]
    taught = [line for problem in train[: words.taught] for line in demonstrations(problem, rng)]
    files = {
        name: [{"question": problem.question, "answer": problem.answer} for problem in drawn]
        for name, drawn in (("train", train), ("held_out", held_out))
    }
    words.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in {**files, "demonstrations": taught}.items():
        (words.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{words.folder / name}.jsonl: {len(rows)} lines")


if __name__ == "__main__":
    main()
