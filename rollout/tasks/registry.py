"""Tasks by name, or by the file and class of a user: `my_task.py:MyTask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from marsrl.rollout.config import OptionValues, read_settings
from marsrl.rollout.own_classes import is_own
from marsrl.rollout.rewards.judge import RewardPool
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER, ArithmeticTask
from marsrl.rollout.tasks.config import ArithmeticOptions, MathOptions, QaOptions
from marsrl.rollout.tasks.data import draw_held_out
from marsrl.rollout.tasks.facts_tutor import CALLS_TOKENIZER, FACTS_TOKENIZER
from marsrl.rollout.tasks.own_task import make_own_task
from marsrl.rollout.tasks.problem_files import draw_endlessly
from marsrl.rollout.tasks.protocol import ProblemSource, Task
from marsrl.rollout.tasks.qa import QaTask
from marsrl.rollout.types import Problem, Reward

TASKS: Mapping[str, type[ArithmeticOptions | MathOptions | QaOptions]] = {
    "arithmetic": ArithmeticOptions,
    "math": MathOptions,
    "qa": QaOptions,
}
"""The tasks that ship, with the classes of their task_options."""

TOKENIZERS = {"arithmetic": ARITHMETIC_TOKENIZER, "facts": FACTS_TOKENIZER, "calls": CALLS_TOKENIZER}
"""Tokenizers of policies made for a warm start, by School.tokenizer."""


class ListedTask(Task):
    """A list of problems from files or a user's class, with the pool that judges answers. Close it: it owns processes."""

    def __init__(
        self, name: str, prompts: str, train: Sequence[Problem], held_out: Sequence[Problem], pool: RewardPool
    ) -> None:
        self.name, self.prompts = name, prompts
        self._train, self._held_out, self._pool = train, tuple(held_out), pool

    def problems(self, seed: int) -> ProblemSource:
        return draw_endlessly(self._train, seed)

    def held_out(self, num_problems: int | None, seed: int) -> list[Problem]:
        """A seeded draw without replacement, all of them for None or a larger number; [] without evaluation data."""
        return draw_held_out(self._held_out, num_problems, self.name, seed)

    def judge(self, problem: Problem, answer: str) -> Future[Reward]:
        return self._pool.submit(problem, answer)

    def close(self) -> None:
        self._pool.close()


def prompts_of(name: str, options: OptionValues) -> str:
    """Name of the prompt set that fits the task of this name."""
    if is_own(name):
        return make_own_task(name, options).prompts
    return {"arithmetic": ArithmeticTask.prompts, "math": "math", "qa": QaTask.prompts}[name]


def build_task(
    name: str, options: OptionValues, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
) -> Task:
    """The task of this name.

    train and held_out: problems read from files, or a user's own (arithmetic generates its own, as does qa without any).
    """
    if is_own(name):
        own = make_own_task(name, options)
        given = {"task": name, "options": dict(options)}
        pool = RewardPool(own.options, "marsrl.rollout.tasks.own_task:own_judge", given)
        return ListedTask(own.name, own.prompts, train, held_out, pool)
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; there are {', '.join(TASKS)}, and your own as FILE.py:CLASS")
    checked = read_settings(TASKS[name], options, "task_options.", f"task {name}: ")
    if isinstance(checked, ArithmeticOptions):
        return ArithmeticTask(checked)
    if isinstance(checked, QaOptions):
        return QaTask(train, held_out, checked)
    assert isinstance(checked, MathOptions)
    if not train:
        raise ValueError("task=math needs problems: set data.train to a jsonl or parquet file or a dataset directory")
    return ListedTask("math", "math", train, held_out, RewardPool(checked))
