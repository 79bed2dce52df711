"""The process that judges answers for RewardPool: one JSON line in, one JSON line out.

    python -P -m marsrl.rollout.rewards.judge_process module:function '{"name": "argument"}'

The function, called with these arguments, gives the judge: (problem, answer) -> a reward in [0, 1]. A request is {"problem",
"answer"}, a reply {"reward"} or {"error"}. The first line says that the judge is loaded.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable
from numbers import Real

import numpy as np

from marsrl.rollout.agents.same_answer import same_answer
from marsrl.rollout.types import Problem

_MEMORY_BYTES = 4 << 30  # of address space: a tower of powers must not take the machine with it


def math_judge() -> Callable[[Problem, str], bool]:
    """Judges an answer by the problem's reference (same_answer)."""
    return lambda problem, answer: same_answer(problem.answer or "", answer)


def checked_reward(value: object) -> float:
    """What a judge returned, if it is a reward; ValueError for anything else, NaN too."""
    if isinstance(value, Real | np.bool_) and 0 <= float(value) <= 1:
        return float(value)
    raise ValueError(f"it returned {value!r:.60}, expected a number from 0 to 1")


def main(path: str, arguments: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; we end when it closes our input
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    asked, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nor may what it runs take a request for its input
    os.dup2(2, 1)  # whatever a library prints must not be taken for a reply
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off, as we want them
    module, _, function = path.partition(":")
    judge = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in asked:
            requests.put(line)
        os._exit(0)  # the parent has gone or closed us: end even in the middle of a judgement that hangs

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while True:
        request = json.loads(requests.get())
        reply: dict[str, float | str]
        try:
            reply = {"reward": checked_reward(judge(Problem(**request["problem"]), request["answer"]))}
        except (Exception, RecursionError) as error:  # any failure of the judge is the parent's to count
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
