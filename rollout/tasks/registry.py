"""Tasks by name, or by a user's file and class: `my_task.py:MyTask`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from marsrl.rollout.config import OptionValues, read_settings
from marsrl.rollout.own_classes import is_in_memory
from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.rewards.judge import RewardPool
from marsrl.rollout.tasks.arithmetic import ARITHMETIC_TOKENIZER, arithmetic_task
from marsrl.rollout.tasks.config import ArithmeticOptions, QaOptions
from marsrl.rollout.tasks.facts.tutor import CALLS_TOKENIZER, FACTS_TOKENIZER
from marsrl.rollout.tasks.find_task import REASONING_GYM, lists_problems, make_own_task
from marsrl.rollout.tasks.problem_files import listed_task
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.qa import qa_task
from marsrl.rollout.types import Problem

TASKS: Mapping[str, type[ArithmeticOptions | JudgeOptions | QaOptions]] = {
    "arithmetic": ArithmeticOptions,
    "math": JudgeOptions,
    "qa": QaOptions,
}
"""Built-in tasks, with the classes of their task_options."""

TOKENIZERS = {"arithmetic": ARITHMETIC_TOKENIZER, "facts": FACTS_TOKENIZER, "calls": CALLS_TOKENIZER}
"""Tokenizers of policies made for a warm start, by Tutor.tokenizer."""


def prompts_of(name: str, options: OptionValues) -> str:
    """Return the name of the prompt set that fits the task of this name."""
    if lists_problems(name):
        return make_own_task(name, options).prompts
    return {"arithmetic": "chain", "math": "math", "qa": "qa"}[name]


def build_task(
    name: str, options: OptionValues, train: Sequence[Problem] = (), held_out: Sequence[Problem] = ()
) -> Task:
    """Build the task of this name.

    train and held_out: problems read from files or listed by a user's task; arithmetic, and qa without them, generate problems.
    The caller closes the task, which may own processes.
    """
    if lists_problems(name):
        own_task = make_own_task(name, options)
        judge_arguments = {"task": name, "options": dict(options)}
        judge = "gym_problems:gym_judge" if name == REASONING_GYM else "find_task:own_judge"
        pool = RewardPool(
            own_task.options, f"marsrl.rollout.tasks.{judge}", judge_arguments, is_here=is_in_memory(name)
        )
        return listed_task(own_task.name, own_task.prompts, train, held_out, pool.submit, pool.close)
    if name not in TASKS:
        raise ValueError(
            f"task is {name!r}; expected one of {', '.join(TASKS)}, {REASONING_GYM}, or your own as FILE.py:CLASS"
        )
    checked = read_settings(TASKS[name], options, "task_options.", f"task {name}: ")
    if isinstance(checked, ArithmeticOptions):
        return arithmetic_task(checked)
    if isinstance(checked, QaOptions):
        return qa_task(train, held_out, checked)
    assert isinstance(checked, JudgeOptions)
    if not train:
        raise ValueError("task=math needs problems: set data.train to a jsonl or parquet file or a dataset directory")
    pool = RewardPool(checked)
    return listed_task("math", "math", train, held_out, pool.submit, pool.close)
