"""Samples of several policy versions, credited, packed and put into the loss: each weight worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from letters import sampled

from marsrl.kernels import LossInputs, PolicyLoss, PolicyObjective, policy_loss
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group, Segment
from marsrl.trainer.config import CreditConfig, LossConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.packing import PackedBatch, pack

# p_trainer / p_rollout of every token: what versions 3, 4 and 5 sampled, seen from the policy in training
RIGHT = [0.25, 1.1, 3.0, 6.0]  # segments [0, 2) of version 3, [2, 3) of 4, [3, 4) of 5; reward 1
WRONG = [0.6, 0.9]  # segments [0, 1) of version 4, [1, 2) of 5; reward 0
TRAINER = -1.0  # log-prob of every token in training, nats
N = len(RIGHT) + len(WRONG)


def batch_of_versions() -> PackedBatch:
    segments = ((Segment(0, 2, 3), Segment(2, 3, 4), Segment(3, 4, 5)), (Segment(0, 1, 4), Segment(1, 2, 5)))
    samples = tuple(
        sampled(
            f"1/solver:{i}",
            reward,
            tokens=len(ratios),
            rollout_logprobs=(TRAINER - np.log(ratios)).astype(np.float32),
            segments=segments[i],
        )
        for i, (reward, ratios) in enumerate(((1.0, RIGHT), (0.0, WRONG)))
    )
    credited = credit([Group("1/solver", "1", "solver", samples)], CreditConfig(), {"solver": AgentConfig()})
    assert credited.num_tokens == N
    return pack(credited.sequences)


def loss_of(settings: LossConfig, moved: float = 0.0) -> PolicyLoss:
    """moved: by how much the log-probs have risen since the step began."""
    batch = batch_of_versions()
    start = torch.full((batch.num_tokens,), TRAINER, dtype=torch.float64)
    old = {"pois": None, "sais": batch.rollout_logprobs, "recompute": start}[settings.old_policy]
    objective = PolicyObjective(
        correction=settings.correction,
        correction_low=settings.correction_low,
        correction_high=settings.upper_bound,
        mpt_probability=None,
    )
    return policy_loss(
        (start + moved).requires_grad_(),
        torch.zeros_like(start),
        LossInputs(
            objective=objective,
            advantages=batch.advantages,
            mask=batch.mask,
            cu_seqlens=batch.cu_seqlens,
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            normaliser=float(N),
        ),
    )


def weights(loss: PolicyLoss) -> list[float]:
    """Each token's weight on A d log p / N: 1 = plain policy gradient. A is +1 for the right sample, -1 for the wrong one."""
    mask = batch_of_versions().mask
    advantage = torch.tensor([1.0] * len(RIGHT) + [-1.0] * len(WRONG))
    return (-loss.coefficient[mask] * N / advantage).tolist()


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
        ({"old_policy": "recompute"}, 1.0, PLAIN),
        ({"old_policy": "recompute"}, 1.1, [1.1] * N),
        ({"old_policy": "recompute"}, 1.3, [1.3 * w for w in ONLY_WRONG]),
        # tis weighs by the mismatch, cut off at two; with recompute that of the policy at the step's start
        ({"correction": "tis"}, 1.0, CUT_OFF),
        ({"old_policy": "recompute", "correction": "tis"}, 1.0, CUT_OFF),
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
    """rise: of every token's probability since the step began."""
    loss = loss_of(LossConfig(**settings), moved=math.log(rise))
    assert weights(loss) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    lost = "masked_tokens" if "correction" in settings else "clipped_tokens"
    assert float(loss.agent_sums[lost].sum()) == expected.count(0.0)
    assert float(loss.agent_sums["tokens"].sum()) == N  # masked ones stay in the count


def test_a_correction_that_would_change_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"loss.correction=tis changes nothing with loss.old_policy=sais"):
        LossConfig(old_policy="sais", correction="tis")
