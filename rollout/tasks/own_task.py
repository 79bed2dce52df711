"""A user's own task: `task: my_task.py:MyTask`.

class Additions(OwnTask):
    def problems(self):
        return [(f"What is {n} + {n}?", str(2 * n)) for n in range(1000)]

    def reward(self, problem, answer):
        return 1.0 if answer == problem.answer else 0.0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from marsrl.rollout.agents.prompts import set_names
from marsrl.rollout.config import OptionValues, read_settings
from marsrl.rollout.imports import check_installed
from marsrl.rollout.jsonl import well_formed
from marsrl.rollout.own_classes import is_own, own_class
from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.types import Problem

REASONING_GYM = "reasoning_gym"

Listed = Sequence[Problem | tuple[str, str | None]]


class OwnTask:
    """Problems, and rewards of answers to them.

    The trainer lists the problems once, when it checks its settings. `reward` runs in separate processes, each with an object of
    this class without data: it may take task_options.timeout_s, and may crash.

    Args:
        options: values of Options.
        train, held_out: the problems of data.train and data.eval; empty if not given.
    """

    class Options(JudgeOptions):
        """task_options of this task."""

    name: ClassVar[str] = ""
    prompts: ClassVar[str] = "math"
    """The prompt set: each role's prompt, and the parser of its answer (math: the last \\boxed{})."""

    def __init__(
        self, options: JudgeOptions | None = None, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
    ) -> None:
        self.options = self.Options() if options is None else options
        self.train_data = tuple(train)
        self.eval_data = tuple(held_out)

    def problems(self) -> Listed:
        """Training problems: (question, reference answer), or Problem. By default those of data.train."""
        return self.train_data

    def held_out(self) -> Listed:
        """Evaluation problems. By default those of data.eval; without any, a tenth of `problems` is held out."""
        return self.eval_data

    def reward(self, problem: Problem, answer: str) -> float:
        """The reward, in [0, 1], of an answer parsed from a completion. For a Verifier only 1 is right.

        An exception, or any other value, is a missing reward, never 0.
        """
        raise NotImplementedError(f"{type(self).__name__}.reward: say what an answer is worth")


def lists_problems(task: str) -> bool:
    """True for a task that is an OwnTask: a user's, and reasoning_gym."""
    return is_own(task) or task == REASONING_GYM


def find_own_task(name: str) -> type[OwnTask]:
    """The class FILE.py:CLASS, or that of reasoning_gym; ValueError says what is wrong with it."""
    if name == REASONING_GYM:
        from marsrl.rollout.tasks.gym_problems import ReasoningGym  # which extends OwnTask

        check_installed("task=reasoning_gym", "reasoning_gym", extra="reasoning_gym")
        return ReasoningGym
    kind = own_class("task", name, OwnTask)
    if not issubclass(kind.Options, OwnTask.Options):
        raise ValueError(f"task is {name!r}: {kind.__name__}.Options does not extend OwnTask.Options")
    if kind.prompts not in set_names():
        raise ValueError(
            f"task is {name!r}: {kind.__name__}.prompts: no prompt set is called {kind.prompts!r}; there are "
            f"{', '.join(set_names())}; a file goes to agents.<name>.prompt"
        )
    if not kind.name:
        kind.name = kind.__name__
    return kind


def make_own_task(
    name: str, options: OptionValues, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
) -> OwnTask:
    """The user's task with these task_options and data; ValueError if they are invalid or its own code fails."""
    kind = find_own_task(name)
    checked = read_settings(kind.Options, options, "task_options.", f"task {kind.name}: ")
    try:
        return kind(checked, train, held_out)
    except Exception as error:
        raise ValueError(f"task is {name!r}: making {kind.__name__} raises {type(error).__name__}: {error}") from error


def own_problems(
    name: str, options: OptionValues, train: Sequence[Problem], held_out: Sequence[Problem]
) -> tuple[list[Problem], list[Problem]]:
    """(problems to train on, problems to evaluate on) of the user's task, given those of data.train and data.eval.

    ValueError: its code fails, or does not return a list of problems.
    """
    task = make_own_task(name, options, train, held_out)
    return _listed(name, task, "problems"), _listed(name, task, "held_out")


def own_judge(task: str, options: OptionValues) -> Callable[[Problem, str], float]:
    """`reward` of the user's task, for a judge process."""
    return make_own_task(task, options).reward


def _listed(name: str, task: OwnTask, method: str) -> list[Problem]:
    where = f"task is {name!r}: {method}"
    try:
        found = getattr(task, method)()
    except Exception as error:
        raise ValueError(f"{where} raises {type(error).__name__}: {error}") from error
    if not isinstance(found, list | tuple):
        raise ValueError(f"{where} returns {type(found).__name__}, expected a list of (question, answer) or of Problem")
    problems = [_problem(task.name, f"{where}[{i}]", f"{method}:{i + 1}", each) for i, each in enumerate(found)]
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError(f"{where} has two problems with the same id, expected one id each")
    if not problems and method == "problems":
        raise ValueError(f"{where} is empty: return some, or set data.train, whose problems it returns by default")
    return problems


def _problem(task: str, where: str, uid: str, item: object) -> Problem:
    if isinstance(item, Problem):
        problem = item
    elif isinstance(item, tuple | list) and len(item) == 2:
        problem = Problem(uid, item[0], item[1], task)
    else:
        raise ValueError(f"{where} is {item!r:.80}, expected (question, answer) or a Problem")
    is_text = isinstance(problem.question, str) and isinstance(problem.answer, str | None)
    if not is_text or not problem.question.strip() or not isinstance(problem.id, str):
        raise ValueError(
            f"{where} is {item!r:.80}, expected a question, an answer and an id as text (the answer may be None)"
        )
    well_formed(f"{problem.question}{problem.answer}", where)
    return problem
