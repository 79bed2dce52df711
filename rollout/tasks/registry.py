"""Tasks by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from marsrl.rollout.config import problems_of
from marsrl.rollout.tasks.arithmetic import ArithmeticTask
from marsrl.rollout.tasks.config import ArithmeticOptions, MathOptions
from marsrl.rollout.tasks.math import MathTask
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.types import Problem

TASKS = ("arithmetic", "math")


def build_task(
    name: str,
    options: Mapping[str, int | float | str | bool | None],
    train: Sequence[Problem] = (),
    held_out: Sequence[Problem] = (),
) -> Task:
    """The task of this name. train and held_out: problems read from files (task=math; arithmetic makes its own)."""
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; there are {', '.join(TASKS)}")
    try:
        if name == "arithmetic":
            return ArithmeticTask(ArithmeticOptions.model_validate(dict(options)))
        math_options = MathOptions.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"task {name}: {problems_of(error, 'task_options.')}") from error
    if not train:
        raise ValueError("task=math needs problems: set data.train to a jsonl or parquet file or a dataset directory")
    return MathTask(train, held_out, math_options)
