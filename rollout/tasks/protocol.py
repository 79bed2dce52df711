"""The protocol of tasks: problems, held-out problems, and a judgement of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import Problem, Reward

EVALUATION_SET, INPUTS_SET = 0, 1
"""Seeds of the two held-out draws: independent of run.seed, and different from each other."""


@dataclass(frozen=True, slots=True)
class CursorState:
    """State of a source of problems, enough to resume it exactly. files: of each file of a mixture."""

    epoch: int
    position: int
    files: tuple[CursorState, ...] = ()


OTHER_DATA = (
    "the checkpoint stands at a place that data.train does not have: resume with the files, counts and weights that the run was "
    "started with"
)


class ProblemSource(Protocol):
    """An endless stream of problems; state() and load() resume it exactly."""

    def next_problem(self) -> Problem: ...

    def state(self) -> CursorState: ...

    def load(self, state: CursorState) -> None: ...


class NumberedProblems:
    """A source that generates problem by problem: draw(0), draw(1), ..., so that its state is one number."""

    def __init__(self, draw: Callable[[int], Problem]) -> None:
        self._draw, self._position = draw, 0

    def next_problem(self) -> Problem:
        self._position += 1
        return self._draw(self._position - 1)

    def state(self) -> CursorState:
        return CursorState(epoch=0, position=self._position)

    def load(self, state: CursorState) -> None:
        self._position = state.position


HELD_OUT = 64
"""Number of evaluation problems if evaluate.num_problems is null and no file determines it."""


class Task(Protocol):
    """A kind of problem.

    prompts: name of its default prompt set. documents, papers: searched if tools.search.corpus and tools.scholar.corpus are null.
    """

    name: str
    prompts: str
    documents: Sequence[Document] = ()
    papers: Sequence[Document] = ()

    def problems(self, seed: int) -> ProblemSource:
        """An endless training stream determined by the seed."""

    def held_out(self, num_problems: int | None, seed: int) -> list[Problem]:
        """num_problems evaluation problems, which `problems` never yields; None: all given ones, or HELD_OUT of a task that
        generates them."""

    def judge(self, problem: Problem, answer: str) -> Future[Reward]:
        """Begin a judgement (rewards/judge.py). The reward of an answer that cannot be judged is missing, never 0."""

    def close(self) -> None:
        """Release resources, such as processes."""
        return
