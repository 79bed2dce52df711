"""policy_loss: the C++ objective against its definition in float64, and facts worked out by hand."""

import math

import pytest
import torch
from clamp_cases import CASES, check_clamp, one_token
from fused_head import compare_policy_loss_of_logprobs, policy_loss
from policy_cases import OBJECTIVES, poison_masked, policy_case

from marsrl.kernels import LossInputs, PolicyObjective, token_marks


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name)


def one(logp, advantage, objective, **given):
    """Loss and slope of a single token whose old log-prob is log 1/2."""
    return one_token(logp, advantage, objective, **{"old_logprobs": torch.tensor([math.log(0.5)]), **given})


def test_the_clip_stops_the_gradient_only_where_the_ratio_left_in_the_direction_of_the_advantage():
    objective = PolicyObjective(dual_clip=3.0)
    assert one(math.log(0.55), 2.0, objective)[:2] == pytest.approx((-2.2, -2.2))  # ratio 1.1
    assert one(math.log(0.75), 2.0, objective)[:2] == pytest.approx((-2.4, 0.0))  # 1.5 clipped to 1.2
    assert one(math.log(0.75), -2.0, objective)[:2] == pytest.approx((3.0, 3.0))
    assert one(math.log(0.25), -2.0, objective)[:2] == pytest.approx((1.6, 0.0))  # 0.5 clipped to 0.8
    given = {"old_logprobs": torch.tensor([math.log(0.1)])}
    assert one(math.log(0.5), -2.0, objective, **given)[:2] == pytest.approx((6.0, 0.0))  # 5 stopped at 3


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_log_ratios_are_clamped_to_20_nats_and_counted(name, implementation):
    check_clamp(name, implementation)


def test_the_gate_masks_sure_tokens_of_its_samples_and_keeps_them_in_the_count():
    for gate, expected in ((True, 0.0), (False, -2.0)):
        loss, slope, result = one(math.log(0.995), 2.0, PolicyObjective(), old_logprobs=None, gate=torch.tensor([gate]))
        assert (loss, slope) == pytest.approx((expected, expected))
        assert result.agent_sums["masked_tokens"].item() == gate and result.agent_sums["tokens"].item() == 1
    assert one(math.log(0.98), 2.0, PolicyObjective(), old_logprobs=None, gate=torch.tensor([True]))[1] == -2.0


def test_a_weight_is_on_every_term_and_a_dropped_token_loses_every_term():
    objective = PolicyObjective(kl="k1", kl_coef=0.5, entropy_coef=0.25)
    given = {"old_logprobs": None, "reference_logprobs": torch.tensor([math.log(0.5)])}
    loss, slope, _ = one(math.log(0.3), 2.0, objective, **given)
    weighted = one(math.log(0.3), 2.0, objective, **given, weights=torch.tensor([0.125]))
    assert weighted[:2] == pytest.approx((loss / 8, slope / 8)) and weighted[2].agent_sums["loss"].item() == weighted[0]
    dropped = one(math.log(0.3), 2.0, objective, **given, dropped=torch.tensor([True]))
    assert dropped[:2] == (0, 0) and dropped[2].agent_sums["masked_tokens"].item() == 1
    first = one(math.log(0.3), 2.0, PolicyObjective(), old_logprobs=None)
    same = one(math.log(0.3), 2.0, PolicyObjective(), old_logprobs=None, weights=torch.ones(1))
    assert first[:2] == same[:2]  # to the last digit


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_marks_of_tokens_add_up_to_what_the_loss_counts(name):
    arguments, logprobs = policy_case(name=name)
    objective, is_off_policy = OBJECTIVES[name]
    arguments = arguments if is_off_policy else {**arguments, "old_logprobs": None}
    inputs = LossInputs(**poison_masked(arguments), objective=objective)
    logprobs = logprobs.masked_fill(~inputs.mask, math.nan)
    marks = token_marks(logprobs, logprobs, inputs)
    sums = policy_loss(logprobs, torch.zeros_like(logprobs), **vars(inputs)).agent_sums
    assert marks.clipped.sum() == sums["clipped_tokens"].sum() and marks.masked.sum() == sums["masked_tokens"].sum()
    assert not (marks.gated & ~marks.masked).any() and not (marks.masked & ~inputs.mask).any()
    if objective.correction in ("none", "tis"):
        assert bool((marks.gated == marks.masked).all())


def test_a_token_that_a_correction_leaves_out_is_masked_and_not_gated():
    inputs = LossInputs(
        objective=PolicyObjective(correction="icepop"),
        cu_seqlens=torch.tensor([0, 3]),
        normaliser=1.0,
        advantages=torch.tensor([2.0]),
        gate=torch.tensor([True]),
        rollout_logprobs=torch.tensor([-5.0, -0.001, -0.5]),  # the first 150 times less sure than the trainer
    )
    marks = token_marks(torch.tensor([-0.02, -0.001, -0.5]), torch.zeros(3), inputs)
    assert marks.gated.tolist() == [False, True, False] and marks.masked.tolist() == [True, True, False]
