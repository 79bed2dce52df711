"""Interface of tasks: problems, held-out problems, and a judge of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marsrl.rollout.rewards.judge import Judge
from marsrl.rollout.tools.documents import Document
from marsrl.rollout.types import Problem

EVALUATION_SET, INPUTS_SET = 0, 1
"""Seeds of the two draws of held-out problems, for evaluations and for fixed inputs; independent of run.seed."""

HELD_OUT = 64
"""Number of evaluation problems if evaluate.num_problems is null and no file determines it."""

ProblemSource = Callable[[int], Problem]
"""Endless stream of problems by draw number 0, 1, 2, ... A problem depends on the number alone, so resuming needs no other
state."""


@dataclass(frozen=True, slots=True)
class Task:
    """Task: a kind of problem, with a judge of answers.

    prompts: name of the default prompt set. problems: function of a seed that returns an endless stream of training problems.
    held_out: function of (num_problems, seed) that returns evaluation problems, which `problems` never yields; num_problems None:
    all problems of the files, or HELD_OUT generated problems. judge: judge of answers; the reward of an answer that cannot be
    judged is missing, never 0. documents, papers: corpora to search if tools.search.corpus and tools.scholar.corpus are null.
    close: releases resources, such as processes.
    """

    name: str
    prompts: str
    problems: Callable[[int], ProblemSource]
    held_out: Callable[[int | None, int], list[Problem]]
    judge: Judge
    documents: Sequence[Document] = ()
    papers: Sequence[Document] = ()
    close: Callable[[], None] = lambda: None
