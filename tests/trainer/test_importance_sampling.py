"""Samples of several policy versions, credited, packed and put into the loss: each weight worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from marsrl.kernels import LossInputs, PolicyLoss, PolicyObjective, policy_loss
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Finish, Group, Reward, Sample, Segment
from marsrl.trainer.config import CreditConfig, LossConfig
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.packing import PackedBatch, pack
from marsrl.trainer.learner.learner import Learner

# p_trainer / p_rollout of every token: what versions 3, 4 and 5 sampled, seen from the policy in training
RIGHT = [0.25, 1.1, 3.0, 6.0]  # segments [0, 2) of version 3, [2, 3) of 4, [3, 4) of 5; reward 1
WRONG = [0.6, 0.9]  # segments [0, 1) of version 4, [1, 2) of 5; reward 0
TRAINER = -1.0  # log-prob of every token in training, nats
N = len(RIGHT) + len(WRONG)


def sample(index: int, ratios: list[float], segments: tuple[Segment, ...], reward: float) -> Sample:
    n = len(ratios)
    return Sample(
        uid=f"1/solver:{index}",
        rollout_id="1",
        problem_id="p",
        agent="solver",
        group_id="1/solver",
        parent_uid=None,
        prompt_ids=np.array([7, 8], np.int32),
        token_ids=np.arange(10, 10 + n, dtype=np.int32),
        is_sampled=np.ones(n, bool),
        rollout_logprobs=(TRAINER - np.log(ratios)).astype(np.float32),
        segments=segments,
        finish=Finish.STOP,
        reward=Reward(reward, reward),
    )


def batch_of_versions() -> PackedBatch:
    right = sample(0, RIGHT, (Segment(0, 2, 3), Segment(2, 3, 4), Segment(3, 4, 5)), 1.0)
    wrong = sample(1, WRONG, (Segment(0, 1, 4), Segment(1, 2, 5)), 0.0)
    credited = credit([Group("1/solver", "1", "solver", (right, wrong))], CreditConfig(), {"solver": AgentConfig()})
    assert credited.num_tokens == N
    return pack(credited.sequences)


def loss_of(settings: LossConfig, moved: float = 0.0) -> PolicyLoss:
    """moved: by how much the log-probs have risen since the step began."""
    batch = batch_of_versions()
    start = torch.full((batch.num_tokens,), TRAINER, dtype=torch.float64)
    learner: Any = SimpleNamespace(
        _old_policy=settings.old_policy,
        _reference=None,
        _passes=SimpleNamespace(
            forward_and_experts=lambda batches, needs_logprobs: ([start] if needs_logprobs else [], [None])
        ),
    )
    (old,) = Learner._old(learner, [batch], is_first=True)
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
            old_logprobs=old.logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            normaliser=float(N),
        ),
    )


def weights(loss: PolicyLoss) -> list[float]:
    """Each token's weight on A d log p / N: 1 = plain policy gradient. A is +1 for the right sample, -1 for the wrong one."""
    mask = batch_of_versions().mask
    advantage = torch.tensor([1.0] * len(RIGHT) + [-1.0] * len(WRONG))
    return (-loss.coefficient[mask] * N / advantage).tolist()


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-5, abs=1e-7)


def test_pois_takes_every_token_for_one_of_the_present_policy() -> None:
    assert weights(loss_of(LossConfig())) == close([1.0] * N)


def test_sais_weighs_a_token_against_the_version_that_decoded_it_and_clips() -> None:
    """r A where r is inside the clip or the move is back towards it: 3.0 and 6.0 are above 1.2 with A > 0; 0.6 is below
    0.8 with A < 0."""
    loss = loss_of(LossConfig(old_policy="sais"))
    assert weights(loss) == close([0.25, 1.1, 0.0, 0.0, 0.0, 0.9])
    assert float(loss.agent_sums["clipped_tokens"].sum()) == 3


def test_recompute_is_pois_at_the_first_update_and_clips_at_later_ones() -> None:
    settings = LossConfig(old_policy="recompute")
    assert weights(loss_of(settings)) == close([1.0] * N)
    assert weights(loss_of(settings, moved=math.log(1.1))) == close([1.1] * N)
    assert weights(loss_of(settings, moved=math.log(1.3))) == close([0.0] * len(RIGHT) + [1.3] * len(WRONG))


@pytest.mark.parametrize("old_policy", ["pois", "recompute"])
def test_tis_weighs_by_the_mismatch_cut_off_at_two(old_policy: Any) -> None:
    settings = LossConfig(old_policy=old_policy, correction="tis")
    assert weights(loss_of(settings)) == close([0.25, 1.1, 2.0, 2.0, 0.6, 0.9])


def test_with_recompute_the_mismatch_is_that_of_the_policy_at_the_steps_start() -> None:
    settings = LossConfig(old_policy="recompute", correction="tis")
    expected = [0.25, 1.1, 2.0, 2.0, 0.6, 0.9]
    assert weights(loss_of(settings, moved=math.log(1.1))) == close([1.1 * w for w in expected])


def test_icepop_masks_tokens_outside_a_half_and_five() -> None:
    loss = loss_of(LossConfig(correction="icepop"))
    assert weights(loss) == close([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert float(loss.agent_sums["masked_tokens"].sum()) == 2
    assert float(loss.agent_sums["tokens"].sum()) == N  # masked ones stay in the count


def test_sequence_mask_judges_a_sample_by_its_geometric_mean() -> None:
    """(0.25 x 1.1 x 3 x 6)^(1/4) = 1.49 and (0.6 x 0.9)^(1/2) = 0.73."""
    assert weights(loss_of(LossConfig(correction="sequence_mask"))) == close([1.0] * N)
    narrow = LossConfig(correction="sequence_mask", correction_low=0.75)
    assert weights(loss_of(narrow)) == close([1.0] * len(RIGHT) + [0.0] * len(WRONG))
    narrow = LossConfig(correction="sequence_mask", correction_high=1.4)
    assert weights(loss_of(narrow)) == close([0.0] * len(RIGHT) + [1.0] * len(WRONG))


def test_a_correction_that_would_change_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"loss.correction=tis changes nothing with loss.old_policy=sais"):
        LossConfig(old_policy="sais", correction="tis")
