"""Judges answers in processes of their own, with a timeout that holds.

A comparison of two answers may hang (sympy ignores signals in places) or crash, and so may a user's own judge; answers are
hostile input. Each judgement is made in a worker process; one that passes the deadline is killed and replaced. What could
not be judged is a missing reward with a note, never a 0.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict

from marsrl.rollout.rewards.judge import known
from marsrl.rollout.types import MISSING, Problem, Reward
from marsrl.rollout.worker_process import Crashed, Late, NotStarted, WorkerPool

MATH_JUDGE = "marsrl.rollout.rewards.judge_process:math_judge"
_log = logging.getLogger(__name__)


class RewardPool:
    """Judge processes, and a thread for each that hands it its work; started by the first answers.

        with RewardPool(workers=2, timeout_s=10) as pool:
            reward = pool.submit(problem, r"\\frac{1}{2}").result()

    Args:
        judge: "module:function", importable by a fresh interpreter; called with `arguments` (plain values) it gives the judge,
            (problem, answer) -> a reward in [0, 1].
        needs_reference: without a reference answer nothing can be judged.
    """

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 10.0,
        max_answer_chars: int = 2000,
        judge: str = MATH_JUDGE,
        arguments: Mapping[str, object] | None = None,
        needs_reference: bool = True,
    ) -> None:
        self._timeout_s, self._judge = timeout_s, judge
        self._max_answer_chars, self._needs_reference = max_answer_chars, needs_reference
        module = "marsrl.rollout.rewards.judge_process"
        self._processes = WorkerPool(workers, module, (judge, json.dumps(arguments or {})))
        self._threads = ThreadPoolExecutor(workers, "marsrl-rewards")

    def submit(self, problem: Problem, answer: str) -> Future[Reward]:
        """Begin a judgement. The future is cancelled, or fails with CancelledError, where the pool is closed before; it fails
        with RuntimeError where no judge starts.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._processes.is_closed:
            raise RuntimeError("RewardPool.submit: the pool is closed")
        reward = self._without_worker(problem, answer)
        return self._threads.submit(self._judged, problem, answer) if reward is None else known(reward)

    def _without_worker(self, problem: Problem, answer: str) -> Reward | None:
        if problem.answer is None and self._needs_reference:
            return Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer")
        if len(answer) > self._max_answer_chars:
            return Reward(0.0, 0.0, note=f"an answer of {len(answer)} characters; at most {self._max_answer_chars}")
        return None

    def close(self) -> None:
        """Kill every worker and wait for it. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()
        self._threads.shutdown()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # In threads of the pool.

    def _judged(self, problem: Problem, answer: str) -> Reward:
        try:
            with self._processes.worker() as worker:
                reply = worker.ask({"problem": asdict(problem), "answer": answer}, timeout_s=self._timeout_s)
        except (NotStarted, Late, Crashed) as error:
            return self._lost(error)
        if "error" in reply:
            return Reward(MISSING, MISSING, note=f"the judge failed: {reply['error']}")
        value = float(reply["reward"])
        return Reward(value, value, {"answer": value})

    def _lost(self, error: NotStarted | Late | Crashed) -> Reward:
        if self._processes.is_closed:
            raise CancelledError
        if isinstance(error, NotStarted):
            raise RuntimeError(
                f"the judge process {error}: can {sys.executable} import {self._judge}? (its own message is on stderr)"
            )
        if isinstance(error, Late):
            return Reward(MISSING, MISSING, note=f"the judge took over {self._timeout_s:g} s and was killed")
        _log.warning("a judge process crashed (code %d)", error.status)
        return Reward(MISSING, MISSING, note=f"the judge process crashed (code {error.status})")
