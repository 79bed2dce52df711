"""Judges of answers: called with a problem and an answer, a judge returns the future of a reward at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from marsrl.rollout.types import Problem, Reward

Judge = Callable[[Problem, str], Future[Reward]]
"""An answer that cannot be judged has a missing reward. An exception in the future is not the answer's fault: it ends the run."""


def known(reward: Reward) -> Future[Reward]:
    """A judgement that took no time."""
    future: Future[Reward] = Future()
    future.set_result(reward)
    return future
