"""The process that judges answers for RewardPool (rollout/worker_process.py).

    python -P -m marsrl.rollout.rewards.judge_process CONNECTION module:function '{"name": "argument"}'

The function, called with these arguments, gives the judge: (problem, answer) -> a reward in [0, 1]. A request is {"problem",
"answer"}, a reply {"reward"} or {"error"}.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from numbers import Real

import numpy as np

from marsrl.rollout.agents.same_answer import same_answer
from marsrl.rollout.types import Problem
from marsrl.rollout.worker_process import Answer, serve

_MEMORY_BYTES = 4 << 30


def math_judge() -> Callable[[Problem, str], bool]:
    """Judges an answer by the problem's reference (same_answer)."""
    return lambda problem, answer: same_answer(problem.answer or "", answer)


def checked_reward(value: object) -> float:
    """The judge's return value, if it is a reward; ValueError for anything else, NaN too."""
    if isinstance(value, Real | np.bool_) and 0 <= float(value) <= 1:
        return float(value)
    raise ValueError(f"it returned {value!r:.60}, expected a number from 0 to 1")


def main(line: str, path: str, arguments: str) -> None:
    def load() -> Answer:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, as we want them
        module, _, function = path.partition(":")
        judge = getattr(importlib.import_module(module), function)(**json.loads(arguments))
        return lambda asked: {"reward": checked_reward(judge(Problem(**asked["problem"]), asked["answer"]))}

    serve(line, _MEMORY_BYTES, load)


if __name__ == "__main__":
    main(*sys.argv[1:])
