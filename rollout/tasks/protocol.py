"""Interface of tasks: problems, held-out problems, and a judge of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marsrl.rollout.rewards.judge import Judge
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import Problem

EVALUATION_SET, INPUTS_SET = 0, 1
"""Seeds of the two held-out draws: independent of run.seed, and different from each other."""

HELD_OUT = 64
"""Number of evaluation problems if evaluate.num_problems is null and no file determines it."""

ProblemSource = Callable[[int], Problem]
"""Endless stream of problems by draw number 0, 1, 2, ... A problem depends on the number alone, so resuming needs no other
state."""


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of problem with its judge.

    prompts: name of the default prompt set. problems: seed -> an endless training stream. held_out: (num_problems, seed) ->
    that many evaluation problems, which `problems` never yields; None: all given ones, or HELD_OUT of a task that generates
    them. judge: gives a missing reward, never 0, to an answer that cannot be judged. documents, papers: searched if
    tools.search.corpus and tools.scholar.corpus are null. close: releases resources, such as processes.
    """

    name: str
    prompts: str
    problems: Callable[[int], ProblemSource]
    held_out: Callable[[int | None, int], list[Problem]]
    judge: Judge
    documents: Sequence[Document] = ()
    papers: Sequence[Document] = ()
    close: Callable[[], None] = lambda: None
