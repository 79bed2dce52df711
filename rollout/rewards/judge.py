"""Judges of answers, and processes in which a judge may hang or crash.

A comparison of two answers may hang (sympy ignores signals in places) or crash, and so may a user's judge; answers are
hostile input. RewardPool makes each judgement in a worker process (rollout/worker_process.py), which is killed and replaced
at the deadline.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict
from numbers import Real
from typing import Any

import numpy as np

from marsrl.rollout.agents.same_answer import same_answer
from marsrl.rollout.rewards.config import JudgeOptions
from marsrl.rollout.types import MISSING, Problem, Reward
from marsrl.rollout.worker_process import Answer, Crashed, Failed, Late, NotStarted, WorkerPool

_log = logging.getLogger(__name__)

Judge = Callable[[Problem, str], Future[Reward]]
"""Function that starts judging an answer to a problem and returns a future of its reward.

An answer that cannot be judged gets a missing reward. If the future raises, the cause is not the answer, and the run ends."""

MATH_JUDGE = f"{__name__}:math_judge"
_MEMORY_BYTES = 4 << 30
_ROUNDING = 1e-9  # largest rounding error of a reward of 0 or 1


def known(reward: Reward) -> Future[Reward]:
    """Return a completed future with this reward."""
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future


def judge_processes(number: int, load: str, arguments: Mapping[str, object]) -> WorkerPool:
    """Create worker processes with the judges' memory limit and a fixed hash seed (PYTHONHASHSEED=0)."""
    return WorkerPool(number, load, arguments, _MEMORY_BYTES, {**os.environ, "PYTHONHASHSEED": "0"})


class RewardPool:
    """Pool of judge processes, each with a thread that feeds it; a process starts when an answer needs it.

        with closing(RewardPool(JudgeOptions(workers=2, timeout_s=10))) as pool:
            reward = pool.submit(problem, r"\\frac{1}{2}").result()

    Args:
        judge: "module:function", importable by a fresh interpreter. Called with `arguments` (plain values), it returns the
            judge, (problem, answer) -> a reward in [0, 1]. The built-in judge needs a reference answer.
        is_here: run the judge in threads of this process, if it exists only here. A call that hangs is abandoned at its deadline;
            a crash ends this process.
    """

    def __init__(
        self,
        options: JudgeOptions | None = None,
        judge: str = MATH_JUDGE,
        arguments: Mapping[str, object] | None = None,
        *,
        is_here: bool = False,
    ) -> None:
        self._options, self._judge = options or JudgeOptions(), judge
        judge_arguments = dict(arguments or {})
        self._processes: WorkerPool | _Threads
        if is_here:
            self._processes = _Threads(load_judge(judge, judge_arguments))
        else:
            load = {"path": judge, "arguments": judge_arguments}
            self._processes = judge_processes(self._options.workers, f"{__name__}:load_judge", load)
        self._threads = ThreadPoolExecutor(self._options.workers, "marsrl-rewards")
        self._told: set[str] = set()  # kinds of failures already logged

    def submit(self, problem: Problem, answer: str) -> Future[Reward]:
        """Start a judgement.

        The future is cancelled, or fails with CancelledError, if the pool closes first; it fails with
        RuntimeError if no judge process starts. Raises RuntimeError after `close`.
        """
        if problem.answer is None and self._judge == MATH_JUDGE:
            return known(Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer"))
        if len(answer) > (most := self._options.max_answer_chars):
            return known(Reward(0.0, 0.0, note=f"the answer has {len(answer)} characters; at most {most} allowed"))
        return self._threads.submit(self._judged, problem, answer)

    def close(self) -> None:
        """Kill every worker and wait for it. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()
        self._threads.shutdown()

    def _judged(self, problem: Problem, answer: str) -> Reward:
        """Return the reward of an answer; runs in one of the pool's threads."""
        try:
            request = {"problem": asdict(problem), "answer": answer}
            reply = self._processes.ask(request, timeout_s=self._options.timeout_s)
        except (NotStarted, Failed) as error:
            if self._processes.is_closed:
                raise CancelledError from error
            if isinstance(error, NotStarted):
                raise RuntimeError(
                    f"the judge process {error}; check that {sys.executable} can import {self._judge} (see its message on "
                    "stderr)"
                ) from error
            why = f"took more than {self._options.timeout_s:g} s and was abandoned"
            if isinstance(error, Crashed):
                why = f"process crashed (code {error.status})"
            return self._missing(why)
        if "error" in reply:
            return self._missing(f"failed: {reply['error']}")
        value = float(reply["reward"])
        return Reward(value, value, {"answer": value})

    def _missing(self, why: str) -> Reward:
        """Return a missing reward; log the first of each kind."""
        kind = ":".join(why.split(":", 2)[:2])  # for example "failed: KeyError"
        if kind not in self._told:
            self._told.add(kind)
            _log.warning(
                "the judge %s, so the reward is missing; further cases are only counted (reward/<agent>/missing)", why
            )
        return Reward(MISSING, MISSING, note=f"the judge {why}")


class _Threads:
    """Replacement for a WorkerPool that answers in threads of this process."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self.is_closed = answer, False

    def ask(self, request: dict[str, Any], *, timeout_s: float) -> Mapping[str, Any]:
        """Return the reply, or {"error": type and text} for an exception. Raises Late at the deadline; the thread continues."""
        reply: Future[Mapping[str, object]] = Future()

        def answer() -> None:
            try:
                reply.set_result(self._answer(request))
            except BaseException as error:  # also SystemExit, which would end the thread without a reply
                reply.set_result({"error": f"{type(error).__name__}: {error}"[:300]})

        threading.Thread(target=answer, name="marsrl-judge", daemon=True).start()
        try:
            return reply.result(timeout_s)
        except TimeoutError:
            raise Late() from None

    def close(self) -> None:
        self.is_closed = True


# The functions below run in the worker process, or in one of _Threads.


def math_judge() -> Callable[[Problem, str], bool]:
    return lambda problem, answer: same_answer(problem.answer or "", answer)


def _checked(value: object) -> float:
    """Return the judge's value if it is a valid reward; ValueError for anything else, including NaN.

    A value that differs from 0 or 1 only by rounding is 0 or 1: only 1 counts as right, and 0.7 + 0.2 + 0.1 is below 1.
    """
    number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    for limit in (0.0, 1.0):
        number = limit if abs(number - limit) < _ROUNDING else number
    if 0 <= number <= 1:
        return number
    raise ValueError(f"returned {value!r:.60}; expected a number from 0 to 1")


def load_judge(path: str, arguments: Mapping[str, object]) -> Answer:
    """Load the worker's answering function. path, arguments: as in RewardPool."""
    module, _, function = path.partition(":")
    judge = getattr(importlib.import_module(module), function)(**arguments)
    return lambda asked: {"reward": _checked(judge(Problem(**asked["problem"]), asked["answer"]))}
