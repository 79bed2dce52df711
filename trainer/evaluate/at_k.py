"""pass@k and majorities of k draws, problem by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from marsrl.rollout.agents.same_answer import answer_key
from marsrl.trainer.evaluate.draws import Said
from marsrl.trainer.evaluate.intervals import mean_of
from marsrl.trainer.report.summary import AtK

ORDERS = 64  # random orders of a problem's draws, the first k of which are a sample of k
_RIGHT = "\x00right"  # all right answers count as one, however they are written


def at_k(draws: Mapping[str, Sequence[Said]]) -> AtK:
    """pass@k and majority@k for k = 1, 2, 4, ... and all draws; empty if every problem was drawn once.

    Draws without a judgement are ignored; a problem counts for each k up to its number of draws.
    """
    known = [[said for said in each if said.correct is not None] for _, each in sorted(draws.items())]
    most = max(map(len, known), default=0)
    if most < 2:
        return AtK()
    ks = sorted({most, *(1 << i for i in range(most.bit_length()))})
    chances = [pass_at(len(each), sum((said.correct or 0) >= 1 for said in each), ks) for each in known]
    votes = [majorities(each, ks) for each in known]
    return AtK(
        pass_at={k: mean_of([chance[k] for chance in chances]) for k in ks},
        majority_at={k: mean_of([vote[k][0] for vote in votes]) for k in ks},
        short_majority_at={k: mean_of([vote[k][1] for vote in votes]) for k in ks},
    )


def pass_at(n: int, c: int, ks: Sequence[int]) -> dict[int, float]:
    """The chance that one of k is right, given c right ones of n: 1 - C(n-c, k) / C(n, k), unbiased (Chen et al., eq. 1)."""
    return {k: 1.0 - math.comb(n - c, k) / math.comb(n, k) if k <= n else math.nan for k in ks}


def majorities(draws: Sequence[Said], ks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """(majority@k, that of the shorter half) by k: correctness of the most frequent answer among k draws.

    A mean over ORDERS seeded orders of the draws; ties share. Draws without an answer have no vote; without votes the
    majority is wrong. NaN for fewer than k draws.
    """
    found: dict[int, tuple[float, float]] = {k: (math.nan, math.nan) for k in ks if k > len(draws)}
    if not draws:
        return found
    names = [None if s.answer is None else _RIGHT if (s.correct or 0) >= 1 else answer_key(s.answer) for s in draws]
    kinds = {name: i for i, name in enumerate(dict.fromkeys(name for name in names if name is not None))}
    votes = np.zeros((len(draws), len(kinds)))  # [N, kinds]
    for i, name in enumerate(names):
        if name is not None:
            votes[i, kinds[name]] = 1
    correct = np.array([s.correct or 0.0 for s in draws])
    worth = (votes.T @ correct) / np.maximum(votes.sum(axis=0), 1)
    tokens = np.array([s.tokens for s in draws])
    order = np.argsort(np.random.default_rng(len(draws)).random((ORDERS, len(draws))), axis=1)
    for k in ks:
        if k <= len(draws):
            of_k = order[:, :k]
            by_length = np.take_along_axis(of_k, np.argsort(tokens[of_k], axis=1, kind="stable"), axis=1)
            found[k] = _elected(votes[of_k], worth), _elected(votes[by_length[:, : (k + 1) // 2]], worth)
    return found


def _elected(votes: npt.NDArray[np.float64], worth: npt.NDArray[np.float64]) -> float:
    """votes [orders, k, kinds]; worth [kinds]."""
    if not len(worth):
        return 0.0
    counts = votes.sum(axis=1)
    wins = (counts == counts.max(axis=1, keepdims=True)) & (counts > 0)
    return float(np.mean((wins @ worth) / np.maximum(wins.sum(axis=1), 1)))
