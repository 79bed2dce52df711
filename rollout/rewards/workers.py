"""Judges answers in processes of their own, with a timeout that holds.

A comparison of two answers may hang (sympy ignores signals in places) or crash, and so may a user's own judge; answers are
hostile input. Each judgement is made in a worker process; one that passes the deadline is killed and replaced. What could
not be judged is a missing reward with a note, never a 0.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial

from marsrl.rollout.rewards.judge import known
from marsrl.rollout.types import MISSING, Problem, Reward
from marsrl.rollout.worker_process import Crashed, Late, NotStarted, WorkerPool

MATH_JUDGE = "marsrl.rollout.rewards.judge_process:math_judge"
_log = logging.getLogger(__name__)

_Job = tuple[Problem, str, Future[Reward]]


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
        self._num_workers, self._timeout_s, self._judge = workers, timeout_s, judge
        self._max_answer_chars, self._needs_reference = max_answer_chars, needs_reference
        module = "marsrl.rollout.rewards.judge_process"
        self._processes = WorkerPool(workers, module, (judge, json.dumps(arguments or {})))
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None ends a thread
        self._lock = threading.Lock()  # of the rest
        self._num_open = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, problem: Problem, answer: str) -> Future[Reward]:
        """Begin a judgement. The future is cancelled where the pool is closed before, and fails where no judge starts.

        Raises:
            RuntimeError: the pool is closed.
        """
        reward = self._without_worker(problem, answer)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("RewardPool.submit: the pool is closed")
            if reward is not None:
                return known(reward)
            job = (problem, answer, Future[Reward]())
            self._waiting.put(job)
            self._num_open += 1
            if len(self._threads) < min(self._num_workers, self._num_open):
                self._threads.append(threading.Thread(target=self._serve, name="marsrl-rewards", daemon=True))
                self._threads[-1].start()
        return job[2]

    def _without_worker(self, problem: Problem, answer: str) -> Reward | None:
        if problem.answer is None and self._needs_reference:
            return Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer")
        if len(answer) > self._max_answer_chars:
            return Reward(0.0, 0.0, note=f"an answer of {len(answer)} characters; at most {self._max_answer_chars}")
        return None

    def close(self) -> None:
        """Kill every worker and wait for it. Safe to call twice."""
        with self._lock:
            self._is_closed = True
        self._processes.close()
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # In threads of the pool.

    def _serve(self) -> None:
        while (job := self._waiting.get()) is not None:
            problem, answer, future = job
            try:
                settle: Callable[[], None] = partial(future.set_result, self._judged(problem, answer))
            except Exception as error:
                settle = partial(future.set_exception, error)
            if self._is_closed:
                future.cancel()
            if future.set_running_or_notify_cancel():  # else who waits for it is told
                settle()
            with self._lock:
                self._num_open -= 1

    def _judged(self, problem: Problem, answer: str) -> Reward:
        try:
            with self._processes.worker() as worker:
                reply = worker.ask({"problem": asdict(problem), "answer": answer}, timeout_s=self._timeout_s)
        except NotStarted as error:
            raise RuntimeError(
                f"the judge process {error}: can {sys.executable} import {self._judge}? (its own message is on stderr)"
            ) from None
        except Late:
            return Reward(MISSING, MISSING, note=f"the judge took over {self._timeout_s:g} s and was killed")
        except Crashed as error:
            if not self._is_closed:
                _log.warning("a judge process crashed (code %d)", error.status)
            return Reward(MISSING, MISSING, note=f"the judge process crashed (code {error.status})")
        if "error" in reply:
            return Reward(MISSING, MISSING, note=f"the judge failed: {reply['error']}")
        value = float(reply["reward"])
        return Reward(value, value, {"answer": value})
