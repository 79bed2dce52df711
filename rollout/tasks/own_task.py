"""Base of users' tasks: `task: my_task.py:MyTask`.

class Additions(OwnTask):
    def problems(self):
        return [(f"What is {n} + {n}?", str(2 * n)) for n in range(1000)]

    def reward(self, problem, answer):
        return 1.0 if answer == problem.answer else 0.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.types import Problem

Listed = Sequence[Problem | tuple[str, str | None]]


class OwnTask:
    """Base class of a user's task: problems, and rewards of answers to them.

    The trainer lists the problems once, when it checks its settings. `reward` runs in separate processes, each with an object
    of this class without data. A call may take up to task_options.timeout_s, and may crash.

    Args:
        options: values of Options.
        train, held_out: the problems of data.train and data.eval; empty if not given.
    """

    class Options(JudgeOptions):
        """Settings of this task under task_options."""

    name: ClassVar[str] = ""
    prompts: ClassVar[str] = "math"
    """Prompt set: each role's prompt, and the parser of answers (math: the last \\boxed{}, or the answer stated last)."""

    def __init__(
        self, options: JudgeOptions | None = None, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
    ) -> None:
        self.options = self.Options() if options is None else options
        self.train_data = tuple(train)
        self.eval_data = tuple(held_out)

    def problems(self) -> Listed:
        """Return training problems as (question, reference answer) or Problem; by default the problems of data.train."""
        return self.train_data

    def held_out(self) -> Listed:
        """Return evaluation problems; by default the problems of data.eval, or else a tenth of `problems`, which is held out."""
        return self.eval_data

    def reward(self, problem: Problem, answer: str) -> float:
        """Return the reward, in [0, 1], of an answer parsed from a completion. For verdicts, only answers with 1 are right.

        An exception, or any other value, makes the reward missing, never 0.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.reward is not defined; return the reward of an answer, from 0 to 1"
        )
