"""Tasks by name, or by the file and class of a user: `my_task.py:MyTask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from marsrl.rollout.config import problems_of
from marsrl.rollout.own_classes import is_own
from marsrl.rollout.rewards.workers import MATH_JUDGE, RewardPool
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER, ArithmeticTask
from marsrl.rollout.tasks.config import ArithmeticOptions, JudgeOptions, MathOptions, QaOptions
from marsrl.rollout.tasks.facts_tokenizer import CALLS_TOKENIZER, FACTS_TOKENIZER
from marsrl.rollout.tasks.listed import ListedTask
from marsrl.rollout.tasks.own_task import OptionValues, make_own_task
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.qa import QaTask
from marsrl.rollout.types import Problem

TASKS: Mapping[str, type[ArithmeticOptions | MathOptions | QaOptions]] = {
    "arithmetic": ArithmeticOptions,
    "math": MathOptions,
    "qa": QaOptions,
}
"""The tasks that ship, and the kind of their task_options."""

TOKENIZERS = {"arithmetic": ARITHMETIC_TOKENIZER, "facts": FACTS_TOKENIZER, "calls": CALLS_TOKENIZER}
"""What policies that a school makes read and write with, by School.tokenizer."""


def build_task(
    name: str,
    options: OptionValues,
    train: Sequence[Problem] = (),
    held_out: Sequence[Problem] = (),
) -> Task:
    """The task of this name.

    train and held_out: problems read from files, or a user's own (arithmetic makes its own, qa without any).
    """
    if is_own(name):
        own = make_own_task(name, options)
        pool = _pool(own.options, "marsrl.rollout.tasks.own_task:own_judge", {"task": name, "options": dict(options)})
        return ListedTask(own.name, own.prompts, train, held_out, pool)
    if name not in TASKS:
        raise ValueError(f"task is {name!r}; there are {', '.join(TASKS)}, and your own as FILE.py:CLASS")
    try:
        checked = TASKS[name].model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"task {name}: {problems_of(error, 'task_options.', TASKS[name].model_fields)}") from error
    if isinstance(checked, ArithmeticOptions):
        return ArithmeticTask(checked)
    if isinstance(checked, QaOptions):
        return QaTask(train, held_out, checked)
    assert isinstance(checked, MathOptions)
    if not train:
        raise ValueError("task=math needs problems: set data.train to a jsonl or parquet file or a dataset directory")
    return ListedTask("math", "math", train, held_out, _pool(checked))


def _pool(options: JudgeOptions, judge: str = MATH_JUDGE, arguments: Mapping[str, object] | None = None) -> RewardPool:
    return RewardPool(
        options.workers,
        options.timeout_s,
        options.max_answer_chars,
        judge=judge,
        arguments=arguments,
        needs_reference=judge == MATH_JUDGE,
    )
