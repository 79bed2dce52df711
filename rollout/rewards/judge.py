"""What judges an answer: called with a problem and an answer, it promises a reward and does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from marsrl.rollout.types import Problem, Reward

Judge = Callable[[Problem, str], Future[Reward]]
"""What cannot be judged has a missing reward. An exception in the future is not the answer's fault: it ends the run."""


def known(reward: Reward) -> Future[Reward]:
    """A judgement that took no time."""
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future
