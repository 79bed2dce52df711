"""Compute the exact bias of estimators of credit by turn in a toy game of two turns, by enumerating all outcomes of a group.

    python benchmarks/studies/turn_credit.py

Turn 1 continues (probability 0.5, reward 0.5) or stops (reward 0.6); turn 2 earns 1 (probability 0.4) or 0.

Prints each estimator's expected gradient of both turns, divided by the true gradient (1 means no bias), and its standard
deviation. The last line is about a session of six turns whose rewards are independent noise of equal size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from statistics import fmean, pstdev

import numpy as np

from marsrl.rollout.types import Finish, Group, Reward, Sample, Turn
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.turns import turn_advantages

Rewards = Sequence[float]
"""Rewards of a session's turns."""
Estimator = Callable[[Sequence[Rewards]], Sequence[Sequence[float]]]
"""Function from the rewards of sessions to the advantages of their turns."""

CONTINUES, PAYS = 0.5, 0.4
SESSIONS: tuple[tuple[float, Rewards, tuple[float, float]], ...] = (  # probability, rewards, d log p of both choices
    (CONTINUES * PAYS, (0.5, 1.0), (1 - CONTINUES, 1 - PAYS)),
    (CONTINUES * (1 - PAYS), (0.5, 0.0), (1 - CONTINUES, -PAYS)),
    (1 - CONTINUES, (0.6,), (-CONTINUES, 0.0)),
)
GRADIENT = np.array([CONTINUES * (1 - CONTINUES) * (0.5 + PAYS - 0.6), CONTINUES * PAYS * (1 - PAYS)])


def moments(estimator: Estimator, num_sessions: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ([2] expected estimate / true gradient, [2] standard deviation of the estimate), for both turns."""
    first, second = np.zeros(2), np.zeros(2)
    for sessions, probability in _groups(num_sessions):
        advantages = estimator([SESSIONS[session][1] for session in sessions])
        estimate = np.zeros(2)
        for session, session_advantages in zip(sessions, advantages, strict=True):
            for turn, advantage in enumerate(session_advantages):
                estimate[turn] += advantage * SESSIONS[session][2][turn] / num_sessions
        first += probability * estimate
        second += probability * estimate**2
    return first / GRADIENT, np.sqrt(second - first**2)


def noise(estimator: Estimator, num_sessions: int, num_turns: int) -> float:
    """Return the mean variance of the advantages of a linear estimator, if each turn's reward is noise of variance 1."""
    units = np.eye(num_sessions * num_turns).reshape(-1, num_sessions, num_turns)
    weights = np.array([estimator([list(rewards) for rewards in unit]) for unit in units])
    return float((weights**2).sum(0).mean())


def _groups(num_sessions: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every multiset of sessions with its probability."""
    for sessions in combinations_with_replacement(range(len(SESSIONS)), num_sessions):
        counts = [sessions.count(session) for session in range(len(SESSIONS))]
        orders = math.factorial(num_sessions) / math.prod(map(math.factorial, counts))
        yield sessions, orders * math.prod(SESSIONS[session][0] for session in sessions)


def samples_of(sessions: Sequence[Rewards]) -> Group:
    """Return sessions of one agent with these rewards per turn; turns have two tokens, with one unsampled token between them."""
    return Group("0/solver", "0", "solver", tuple(_sample(i, rewards) for i, rewards in enumerate(sessions)))


def _sample(session: int, rewards: Rewards) -> Sample:
    num_tokens = 3 * len(rewards) - 1
    is_sampled = np.arange(num_tokens) % 3 < 2
    empty, zeros = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32)
    turns = tuple(Turn(k + 1, 3 * k, 3 * k + 2, Finish.STOP) for k in range(len(rewards)))
    reward = Reward(sum(rewards), 0.0, turns=(*rewards[:-1], 0.0))
    name, group = f"0.{session}/solver:0", "0/solver"
    fields = (empty[:1], empty, is_sampled, zeros, (), Finish.STOP)
    return Sample(name, "0", "p", "solver", group, None, *fields, reward=reward, turns=turns)


def ours(sessions: Sequence[Rewards]) -> list[list[float]]:
    """Return the advantages of credit.turns=returns."""
    samples = samples_of(sessions).samples
    found = turn_advantages(samples, CreditConfig(std="none", turns="returns"))
    return [found[sample.uid] for sample in samples]


def leave_one_out(sessions: Sequence[Rewards]) -> list[list[float]]:
    """Return the advantages of credit.std=none: a session's return minus the mean return of the other sessions."""
    whole = [sum(rewards) for rewards in sessions]
    return [[each - fmean(whole[:i] + whole[i + 1 :])] * len(sessions[i]) for i, each in enumerate(whole)]


def group_std(sessions: Sequence[Rewards]) -> list[list[float]]:
    """Return the advantages of credit.std=biased (GRPO): a session's return minus the mean of all returns, divided by their
    standard deviation."""
    whole = [sum(rewards) for rewards in sessions]
    mean, std = fmean(whole), pstdev(whole)
    return [[(each - mean) / std if std else 0.0] * len(rewards) for each, rewards in zip(whole, sessions, strict=True)]


def summed_means(sessions: Sequence[Rewards]) -> list[list[float]]:
    """Return, for each turn, the sum over this and later turns of (reward - mean reward of that turn index).

    Ports of MT-GRPO do so (github.com/verl-project/verl#7244).
    """
    longest = max(map(len, sessions))
    means = [fmean(rewards[k] for rewards in sessions if len(rewards) > k) for k in range(longest)]
    return [
        [sum(rewards[m] - means[m] for m in range(k, len(rewards))) for k in range(len(rewards))]
        for rewards in sessions
    ]


def mean_over_calls(sessions: Sequence[Rewards]) -> list[list[float]]:
    """Return a session's return minus the mean return, in which each call counts once (Dr. MAS without standard deviation)."""
    mean = fmean(sum(rewards) for rewards in sessions for _ in rewards)
    return [[sum(rewards) - mean] * len(rewards) for rewards in sessions]


ESTIMATORS = {
    "trajectory, leave-one-out": leave_one_out,
    "ours": ours,
    "group mean and std": group_std,
    "means by turn, summed": summed_means,
    "mean over calls": mean_over_calls,
}


def table() -> None:
    """Print the estimators' moments."""
    print(f"{'estimator':26}{'G = 2':>14}{'G = 8':>14}{'sd, G = 8':>14}")
    for name, estimator in ESTIMATORS.items():
        (two, _), (eight, deviation) = moments(estimator, 2), moments(estimator, 8)
        cells = (f"{a:.{n}f}, {b:.{n}f}" for n, (a, b) in ((2, two), (2, eight), (3, deviation)))
        print(f"{name:26}{''.join(f'{cell:>14}' for cell in cells)}")
    ratio = noise(ours, 8, 6) / noise(leave_one_out, 8, 6)
    print(f"six turns of independent noise, G = 8: variance of ours over that of leave-one-out {ratio:.2f}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table()
