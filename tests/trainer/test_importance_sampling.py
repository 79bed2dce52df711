"""Samples of several policy versions in the loss: each token's weight worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from marsrl.kernels import LossInputs, PolicyLoss, PolicyObjective, policy_loss
from marsrl.trainer.config import LossConfig

# p_trainer / p_rollout of every token: of two samples, seen from the policy in training
RIGHT = [0.25, 1.1, 3.0, 6.0]  # advantage +1
WRONG = [0.6, 0.9]  # advantage -1
TRAINER = -1.0  # log-prob of every token in training, nats
N = len(RIGHT) + len(WRONG)


def loss_of(settings: LossConfig, moved: float) -> PolicyLoss:
    """moved: by how much the log-probs have risen since the step began."""
    start = torch.full((N,), TRAINER, dtype=torch.float64)
    rollout = start - torch.tensor(RIGHT + WRONG, dtype=torch.float64).log()
    objective = PolicyObjective(
        correction=settings.correction,
        correction_low=settings.correction_low,
        correction_high=settings.upper_bound,
        mpt_probability=None,
    )
    inputs = LossInputs(
        objective=objective,
        advantages=torch.tensor([1.0, -1.0]),
        cu_seqlens=torch.tensor([0, len(RIGHT), N]),
        old_logprobs={"pois": None, "sais": rollout, "recompute": start}[settings.old_policy],
        rollout_logprobs=rollout,
        normaliser=float(N),
    )
    return policy_loss((start + moved).requires_grad_(), torch.zeros_like(start), inputs)


PLAIN, CUT_OFF = [1.0] * N, [0.25, 1.1, 2.0, 2.0, 0.6, 0.9]
ONLY_RIGHT, ONLY_WRONG = [1.0] * len(RIGHT) + [0.0] * len(WRONG), [0.0] * len(RIGHT) + [1.0] * len(WRONG)
MASK: dict[str, Any] = {"correction": "sequence_mask"}


@pytest.mark.parametrize(
    ("settings", "rise", "expected"),
    [
        ({}, 1.0, PLAIN),  # pois takes every token for one of the present policy
        # r A where r is inside the clip or the move is back towards it: 3.0 and 6.0 are above 1.2 with A > 0, 0.6 is
        # below 0.8 with A < 0
        ({"old_policy": "sais"}, 1.0, [0.25, 1.1, 0.0, 0.0, 0.0, 0.9]),
        # recompute is pois at the first update, and clips at later ones
        ({"old_policy": "recompute"}, 1.1, [1.1] * N),
        ({"old_policy": "recompute"}, 1.3, [1.3 * w for w in ONLY_WRONG]),
        # tis weighs by the mismatch, cut off at two; with recompute that of the policy at the step's start
        ({"correction": "tis"}, 1.0, CUT_OFF),
        ({"old_policy": "recompute", "correction": "tis"}, 1.1, [1.1 * w for w in CUT_OFF]),
        # icepop masks tokens outside a half and five
        ({"correction": "icepop"}, 1.0, [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]),
        # of a sample the geometric mean: (0.25 x 1.1 x 3 x 6)^(1/4) = 1.49 and (0.6 x 0.9)^(1/2) = 0.73
        (MASK, 1.0, PLAIN),
        (MASK | {"correction_low": 0.75}, 1.0, ONLY_RIGHT),
        (MASK | {"correction_high": 1.4}, 1.0, ONLY_WRONG),
    ],
)
def test_a_token_weighs_what_loss_says_of_the_version_that_decoded_it(
    settings: dict[str, Any], rise: float, expected: list[float]
) -> None:
    """A weight of 1 is the plain policy gradient. rise: of every token's probability since the step began."""
    loss = loss_of(LossConfig(**settings), moved=math.log(rise))
    advantage = torch.tensor([1.0] * len(RIGHT) + [-1.0] * len(WRONG))
    assert (-loss.coefficient * N / advantage).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    lost = "masked_tokens" if "correction" in settings else "clipped_tokens"
    assert float(loss.agent_sums[lost].sum()) == expected.count(0.0)
    assert float(loss.agent_sums["tokens"].sum()) == N  # masked ones stay in the count
