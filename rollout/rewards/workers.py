"""Judges answers in processes of their own, with a timeout that holds.

A comparison of two answers may hang (sympy ignores signals in places) or crash, and so may a user's own judge; answers are
hostile input. Each judgement is made in a worker process; one that passes the deadline is killed and replaced. What could
not be judged is a missing reward with a note, never a 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import IO

from marsrl.rollout.rewards.judge import known
from marsrl.rollout.types import MISSING, Problem, Reward

MATH_JUDGE = "marsrl.rollout.rewards.judge_process:math_judge"
_START_TIMEOUT_S = 120.0  # loading sympy on a busy machine
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A judgement that is wanted."""

    problem: Problem
    answer: str
    reward: Future[Reward]


class _Worker:
    """One judge process. job: what it works on, None when idle; is_ready: it has loaded its judge."""

    def __init__(self, judge: str, arguments: str) -> None:
        # -P: the working directory is not on the path; its folder names would shadow installed packages.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "marsrl.rollout.rewards.judge_process", judge, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what a judge starts is ended with it
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests: IO[bytes] = self.process.stdin
        self.replies = self.process.stdout.fileno()
        self._buffer = b""
        self.is_ready = False
        self.job: _Job | None = None
        self.deadline = time.monotonic() + _START_TIMEOUT_S

    def submit(self, job: _Job, timeout_s: float) -> None:
        self.job = job
        self.deadline = time.monotonic() + timeout_s
        line = json.dumps({"problem": asdict(job.problem), "answer": job.answer}) + "\n"
        try:
            self._requests.write(line.encode())
            self._requests.flush()
        except BrokenPipeError:
            self.deadline = time.monotonic() + 5.0  # it has died; the end of its replies says so next

    def read(self) -> dict[str, object] | None:
        """One reply, {} where none is whole yet, None where the process has ended."""
        chunk = os.read(self.replies, 1 << 16)
        if not chunk:
            return None
        self._buffer += chunk
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return {}
        self._buffer = rest
        return dict(json.loads(line))

    def settle(self, reward: Reward) -> None:
        """What it works on is judged; it is idle then."""
        assert self.job is not None
        job, self.job = self.job, None
        job.reward.set_result(reward)

    def kill(self) -> int:
        """End the process at once, wait for it, release the pipes; its exit code."""
        with contextlib.suppress(ProcessLookupError):  # it has ended, and has left nobody
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # an unsent request of a dead process; nobody waits for it
            self._requests.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


class RewardPool:
    """A fixed number of judge processes, and a thread that hands them their work; started by the first answer.

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
        self._num_workers = workers
        self._timeout_s = timeout_s
        self._max_answer_chars = max_answer_chars
        self._judge = judge
        self._arguments = json.dumps(arguments or {})
        self._needs_reference = needs_reference
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()  # guards what waits, the thread and its end; workers are the thread's own
        self._thread: threading.Thread | None = None
        self._bell: tuple[int, int] | None = None  # a pipe that wakes the thread
        self._is_closed = False

    def submit(self, problem: Problem, answer: str) -> Future[Reward]:
        """Begin a judgement. The future is cancelled where the pool is closed before, and fails where no judge starts.

        Raises:
            RuntimeError: the pool is closed.
        """
        reward = self._without_worker(problem, answer)
        job = _Job(problem, answer, Future())
        with self._lock:
            if self._is_closed:
                raise RuntimeError("RewardPool.submit: the pool is closed")
            if reward is not None:
                return known(reward)
            self._waiting.append(job)
            if self._bell is None:
                self._bell = os.pipe()
                os.set_blocking(self._bell[1], False)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, args=self._bell[:1], name="marsrl-rewards", daemon=True
                )
                self._thread.start()
            self._ring()
        return job.reward

    def _without_worker(self, problem: Problem, answer: str) -> Reward | None:
        if problem.answer is None and self._needs_reference:
            return Reward(MISSING, MISSING, note=f"problem {problem.id} has no reference answer")
        if len(answer) > self._max_answer_chars:
            return Reward(0.0, 0.0, note=f"an answer of {len(answer)} characters; at most {self._max_answer_chars}")
        return None

    def _ring(self) -> None:
        if self._bell is not None:
            with contextlib.suppress(BlockingIOError):  # it is full of rings that nobody has heard yet
                os.write(self._bell[1], b"!")

    # In the pool's thread.

    def _serve(self, bell: int) -> None:
        """Judgement after judgement until the pool is closed; where no judge can be started, those that wait fail."""
        try:
            while self._hand_out():
                self._collect(bell)
        except Exception as error:
            with self._lock:
                left, self._thread = self._take_all(), None  # the next answer tries again
            for job in left:
                job.reward.set_exception(error)

    def _hand_out(self) -> bool:
        """Give idle workers what waits, and start those that are missing; False where the pool is closed."""
        with self._lock:
            if self._is_closed:
                return False
            num_open = len(self._waiting) + sum(worker.job is not None for worker in self._workers)
            while len(self._workers) < min(self._num_workers, num_open):
                self._workers.append(_Worker(self._judge, self._arguments))
            for worker in self._workers:
                if self._waiting and worker.is_ready and worker.job is None:
                    worker.submit(self._waiting.popleft(), self._timeout_s)
        return True

    def _collect(self, bell: int) -> None:
        """Wait for an answer that comes in, a reply, an end or a deadline, and settle what that settles."""
        busy = [worker for worker in self._workers if worker.job is not None or not worker.is_ready]
        with selectors.DefaultSelector() as selector:
            selector.register(bell, selectors.EVENT_READ, None)
            for worker in busy:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
            soonest = min((worker.deadline for worker in busy), default=None)
            events = selector.select(None if soonest is None else max(0.0, soonest - time.monotonic()))
        for key, _ in events:
            worker = key.data
            if worker is None:
                os.read(bell, 1 << 16)
                continue
            reply = worker.read()
            if reply is None:
                self._replace_ended(worker)
            elif "ready" in reply:
                worker.is_ready = True
            elif reply:
                worker.settle(self._reward(reply))
        now = time.monotonic()
        for worker in busy:
            is_late = (
                now >= worker.deadline and worker in self._workers and (worker.job is not None or not worker.is_ready)
            )
            if is_late:
                self._replace_late(worker)

    def _reward(self, reply: dict[str, object]) -> Reward:
        if "error" in reply:
            return Reward(MISSING, MISSING, note=f"the judge failed: {reply['error']}")
        value = float(str(reply["reward"]))
        return Reward(value, value, {"answer": value})

    def _replace_ended(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        code = worker.kill()
        if not worker.is_ready:
            raise RuntimeError(
                f"the judge process ended with code {code} before it was ready: can {sys.executable} import {self._judge}? (its "
                "own message is on stderr)"
            )
        if worker.job is not None:
            _log.warning("a judge process crashed (code %d)", code)
            worker.settle(Reward(MISSING, MISSING, note=f"the judge process crashed (code {code})"))

    def _replace_late(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.kill()
        if not worker.is_ready:
            raise RuntimeError(
                f"the judge process was not ready after {_START_TIMEOUT_S:.0f} s; is the machine overloaded?"
            )
        note = f"the judge took over {self._timeout_s:g} s and was killed"
        worker.settle(Reward(MISSING, MISSING, note=note))

    def _take_all(self) -> list[_Job]:
        """What is open, which nobody works on any more."""
        left = [*(worker.job for worker in self._workers if worker.job is not None), *self._waiting]
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._waiting.clear()
        return left

    # For whoever made the pool.

    def close(self) -> None:
        """Kill every worker and wait for it. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            self._ring()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            for job in self._take_all():
                job.reward.cancel()
                job.reward.set_running_or_notify_cancel()  # tells who waits for it
            if self._bell is not None:
                os.close(self._bell[0])
                os.close(self._bell[1])
                self._bell = None

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
