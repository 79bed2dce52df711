"""Tasks that list their problems: users' OwnTask classes by FILE.py:CLASS, and reasoning_gym."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marsrl.rollout.agents.prompts import set_names
from marsrl.rollout.config import OptionValues, read_settings
from marsrl.rollout.imports import check_installed
from marsrl.rollout.jsonl import well_formed
from marsrl.rollout.own_classes import is_own, own_class
from marsrl.rollout.tasks.gym_problems import ReasoningGym
from marsrl.rollout.tasks.own_task import OwnTask
from marsrl.rollout.types import Problem

REASONING_GYM = "reasoning_gym"


def lists_problems(task: str) -> bool:
    """Return True for a user's task and for reasoning_gym, which list their problems as an OwnTask."""
    return is_own(task) or task == REASONING_GYM


def find_own_task(name: str) -> type[OwnTask]:
    """Load the class FILE.py:CLASS, or the class for reasoning_gym; ValueError explains what is wrong with it."""
    if name == REASONING_GYM:
        check_installed("task=reasoning_gym", "reasoning_gym", extra="reasoning_gym")
        return ReasoningGym
    kind = own_class("task", name, OwnTask)
    if not issubclass(kind.Options, OwnTask.Options):
        raise ValueError(
            f"task is {name!r}: {kind.__name__}.Options does not extend OwnTask.Options; make it a subclass"
        )
    if kind.prompts not in set_names():
        raise ValueError(
            f"task is {name!r}: {kind.__name__}.prompts is {kind.prompts!r}; expected one of "
            f"{', '.join(set_names())}. Set a prompt file in agents.<name>.prompt"
        )
    if not kind.name:
        kind.name = kind.__name__
    return kind


def make_own_task(
    name: str, options: OptionValues, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
) -> OwnTask:
    """Build the user's task with these task_options and data; ValueError if they are invalid or its code fails."""
    kind = find_own_task(name)
    checked = read_settings(kind.Options, options, "task_options.", f"task {kind.name}: ")
    try:
        return kind(checked, train, held_out)
    except Exception as error:
        raise ValueError(f"task is {name!r}: {kind.__name__}(...) raises {type(error).__name__}: {error}") from error


def own_problems(
    name: str, options: OptionValues, train: Sequence[Problem], held_out: Sequence[Problem]
) -> tuple[list[Problem], list[Problem]]:
    """Return (training problems, evaluation problems) of the user's task, given those of data.train and data.eval.

    Raises ValueError if the task's code fails or does not return a list of problems.
    """
    task = make_own_task(name, options, train, held_out)
    return _listed(name, task, "problems"), _listed(name, task, "held_out")


def own_judge(task: str, options: OptionValues) -> Callable[[Problem, str], float]:
    """Return the method `reward` of the user's task, for a judge process."""
    return make_own_task(task, options).reward


def _listed(name: str, task: OwnTask, method: str) -> list[Problem]:
    where = f"task is {name!r}: {method}"
    try:
        listed = getattr(task, method)()
    except Exception as error:
        raise ValueError(f"{where} raises {type(error).__name__}: {error}") from error
    if not isinstance(listed, list | tuple):
        raise ValueError(
            f"{where} returns {type(listed).__name__}; expected a list of (question, answer) or of Problem"
        )
    problems = [_problem(task.name, f"{where}[{i}]", f"{method}:{i + 1}", item) for i, item in enumerate(listed)]
    if len({problem.id for problem in problems}) < len(problems):
        raise ValueError(f"{where} has two problems with the same id; expected unique ids")
    if not problems and method == "problems":
        raise ValueError(f"{where} is empty; return problems, or set data.train, whose problems it returns by default")
    return problems


def _problem(task: str, where: str, uid: str, item: object) -> Problem:
    if isinstance(item, Problem):
        problem = item
    elif isinstance(item, tuple | list) and len(item) == 2:
        problem = Problem(uid, item[0], item[1], task)
    else:
        raise ValueError(f"{where} is {item!r:.80}; expected (question, answer) or a Problem")
    is_text = isinstance(problem.question, str) and isinstance(problem.answer, str | None)
    if not is_text or not problem.question.strip() or not isinstance(problem.id, str):
        raise ValueError(
            f"{where} is {item!r:.80}; expected a question, an answer and an id as text (the answer may be None)"
        )
    well_formed(f"{problem.question}{problem.answer}", where)
    return problem
