"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from marsrl.rollout.config import problems_of
from marsrl.rollout.tasks.arithmetic import ArithmeticTask
from marsrl.rollout.tasks.config import ArithmeticOptions, MathOptions, QaOptions
from marsrl.rollout.tasks.math import MathTask
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.qa import QaTask
from marsrl.rollout.types import Problem

TASKS = ("arithmetic", "math", "qa")


def build_task(
    name: str,
    options: Mapping[str, int | float | str | bool | None],
    train: Sequence[Problem] = (),
    held_out: Sequence[Problem] = (),
) -> Task:
    """The task of this name. train and held_out: problems read from files (arithmetic makes its own, qa without any)."""
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; there are {', '.join(TASKS)}")
    try:
        if name == "arithmetic":
            return ArithmeticTask(ArithmeticOptions.model_validate(dict(options)))
        if name == "qa":
            return QaTask(train, held_out, QaOptions.model_validate(dict(options)))
        math_options = MathOptions.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"task {name}: {problems_of(error, 'task_options.')}") from error
    if not train:
        raise ValueError("task=math needs problems: set data.train to a jsonl or parquet file or a dataset directory")
    return MathTask(train, held_out, math_options)
