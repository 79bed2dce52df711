"""policy_loss: the C++ objective against its definition in float64, and results worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch
from every_op import IS_INTERPRETED
from fused_head import compare_policy_loss_of_logprobs, policy_loss
from policy_cases import OBJECTIVES, poison_masked, policy_case

from marsrl.kernels import LossInputs, PolicyObjective, token_marks

E20 = math.exp(20)
WIDE = {"correction_low": 0.0, "correction_high": 1e12}
DUAL = PolicyObjective(dual_clip=3.0)
K1 = PolicyObjective(kl="k1", kl_coef=0.5)
# Ratios that are clipped, and log-ratios beyond LOG_RATIO_BOUND; the token's log-prob is always -1.
# name -> objective, advantage, other log-probs, (loss, slope, number of clamped tokens)
BY_HAND = {
    "ratio 1.1": (DUAL, 2.0, {"old": -1 - math.log(1.1)}, (-2.2, -2.2, 0)),
    "ratio 1.5 at 1.2": (DUAL, 2.0, {"old": -1 - math.log(1.5)}, (-2.4, 0, 0)),
    "ratio 1.5, against the advantage": (DUAL, -2.0, {"old": -1 - math.log(1.5)}, (3, 3, 0)),
    "ratio 0.5 at 0.8": (DUAL, -2.0, {"old": -1 - math.log(0.5)}, (1.6, 0, 0)),
    "ratio 5 at 3": (DUAL, -2.0, {"old": -1 - math.log(5)}, (6, 0, 0)),
    "no advantage, above 88": (PolicyObjective(), 0.0, {"old": -91}, (0, 0, 1)),
    "no advantage, below -88": (PolicyObjective(), 0.0, {"old": 89}, (0, 0, 1)),
    "at the bound": (PolicyObjective(), -2.0, {"old": -21}, (2 * E20, 2 * E20, 0)),
    "above": (PolicyObjective(), -2.0, {"old": -22}, (2 * E20, 0, 1)),
    "above, clipped": (PolicyObjective(), 2.0, {"old": -101}, (-2.4, 0, 1)),
    "above, dual clip": (PolicyObjective(dual_clip=3.0), -2.0, {"old": -101}, (6, 0, 1)),
    "below": (PolicyObjective(), 2.0, {"old": 99}, (-2 / E20, 0, 1)),
    "cispo keeps its gradient": (PolicyObjective(kind="cispo"), 2.0, {"old": -101}, (2.4, -2.4, 1)),
    "cispo, no advantage": (PolicyObjective(kind="cispo"), 0.0, {"old": -101}, (0, 0, 1)),
    "of the sequence": (PolicyObjective(ratio="sequence"), -2.0, {"old": -51}, (2 * E20, 0, 1)),
    "tis at 1.1": (PolicyObjective(correction="tis"), 1.0, {"rollout": -1 - math.log(1.1)}, (-1.1, -1.1, 0)),
    "tis": (PolicyObjective(correction="tis"), 1.0, {"rollout": -101}, (-2, -2, 1)),
    "tis with a wide cap": (PolicyObjective(correction="tis", **WIDE), 1.0, {"rollout": -101}, (-E20, -E20, 1)),
    "tis below": (PolicyObjective(correction="tis"), 1.0, {"rollout": 99}, (-1 / E20, -1 / E20, 1)),
    "icepop at 3": (PolicyObjective(correction="icepop", correction_high=5.0), 1.0, {"rollout": -1 - math.log(3)}, (-1, -1, 0)),
    "icepop at 0.25": (PolicyObjective(correction="icepop"), 1.0, {"rollout": -1 - math.log(0.25)}, (0, 0, 0)),
    "icepop counts it as masked": (PolicyObjective(correction="icepop"), 1.0, {"rollout": -101}, (0, 0, 0)),
    "icepop with a wide band": (PolicyObjective(correction="icepop", **WIDE), 1.0, {"rollout": -101}, (-1, -1, 1)),
    "sequence_mask": (PolicyObjective(correction="sequence_mask", **WIDE), 1.0, {"rollout": -101}, (-1, -1, 1)),
    "k3 above": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": -31}, (9.5 + 0.5 / E20, 15, 1)),
    "k3 below": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": 99}, (0.5 * (E20 - 21), -50, 1)),
    "k3 inside": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": -2}, (0.5 / math.e, 0.5, 0)),
    "k1 is not clamped": (PolicyObjective(kl="k1", kl_coef=0.5), 0.0, {"reference": -31}, (15, 15, 0)),
    "k2 is not clamped": (PolicyObjective(kl="k2", kl_coef=0.5), 0.0, {"reference": -31}, (225, 15, 0)),
    "k1, likelier than drawn": (K1, 0.0, {"reference": -3, "rollout": -1 - math.log(4)}, (4, 4, 0)),
    "k1, by the old policy": (K1, 0.0, {"reference": -3, "old": -1 - math.log(4)}, (4, 4, 0)),
    "k1, at most": (replace(K1, correction="tis"), 0.0, {"reference": -3, "rollout": -1 - math.log(4)}, (2, 2, 0)),
    "k1, far above": (K1, 0.0, {"reference": -3, "rollout": -101}, (E20, E20, 1)),
    "k1, far below": (K1, 0.0, {"reference": -3, "rollout": 99}, (1 / E20, 1 / E20, 1)),
}  # fmt: skip


def one_token(logprob, advantage, objective, **inputs):
    """Return loss and slope of a single token, and the whole result."""
    logprobs = torch.tensor([logprob], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.zeros(1),
        objective=objective,
        advantages=torch.tensor([advantage]),
        cu_seqlens=torch.tensor([0, 1]),
        normaliser=1.0,
        **inputs,
    )
    result.loss.backward()
    return result.loss.item(), logprobs.grad.item(), result


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name, implementation):
    compare_policy_loss_of_logprobs(name, 20 if IS_INTERPRETED else 60)


@pytest.mark.smoke
@pytest.mark.parametrize("name", BY_HAND)
def test_clips_stop_the_gradient_and_log_ratios_are_clamped(name, implementation):
    objective, advantage, given, expected = BY_HAND[name]
    inputs = {f"{key}_logprobs": torch.tensor([float(value)]) for key, value in given.items()}

    def run(**more):
        loss, slope, found = one_token(-1.0, advantage, objective, **inputs, **more)
        assert slope == found.coefficient.item()
        return loss, slope, found.agent_sums["clamped_tokens"].item()

    assert run() == pytest.approx(expected, rel=1e-5)
    assert run(dropped=torch.tensor([True])) == (0, 0, 0)  # dropped tokens are not counted as clamped


def test_the_gate_masks_sure_tokens_but_still_counts_them():
    for gate, expected in ((True, 0.0), (False, -2.0)):
        loss, slope, result = one_token(math.log(0.995), 2.0, PolicyObjective(), gate=torch.tensor([gate]))
        assert (loss, slope) == pytest.approx((expected, expected))
        assert result.agent_sums["masked_tokens"].item() == gate and result.agent_sums["tokens"].item() == 1
    assert one_token(math.log(0.98), 2.0, PolicyObjective(), gate=torch.tensor([True]))[1] == -2.0


def test_weights_scale_and_drops_remove_every_term_of_a_token():
    objective = PolicyObjective(kl="k1", kl_coef=0.5, entropy_coef=0.25)
    given = {"reference_logprobs": torch.tensor([math.log(0.5)])}
    loss, slope, _ = one_token(math.log(0.3), 2.0, objective, **given)
    weighted = one_token(math.log(0.3), 2.0, objective, **given, weights=torch.tensor([0.125]))
    assert weighted[:2] == pytest.approx((loss / 8, slope / 8)) and weighted[2].agent_sums["loss"].item() == weighted[0]
    dropped = one_token(math.log(0.3), 2.0, objective, **given, dropped=torch.tensor([True]))
    assert dropped[:2] == (0, 0) and dropped[2].agent_sums["masked_tokens"].item() == 1
    first = one_token(math.log(0.3), 2.0, PolicyObjective())
    same = one_token(math.log(0.3), 2.0, PolicyObjective(), weights=torch.ones(1))
    assert first[:2] == same[:2]  # to the last digit


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.5, 2, [1] * 6), (0.75, 2, [1] * 4 + [0] * 2), (0.5, 1.4, [0] * 4 + [1] * 2)]
)
def test_a_sample_is_masked_by_the_geometric_mean_of_its_ratios(low, high, kept, implementation):
    """The means of the two samples are (0.25 x 1.1 x 3 x 6)^(1/4) = 1.49 and (0.6 x 0.9)^(1/2) = 0.73."""
    drift = torch.tensor([0.25, 1.1, 3.0, 6.0, 0.6, 0.9])
    result = policy_loss(
        torch.full((6,), -1.0),
        torch.zeros(6),
        objective=PolicyObjective(correction="sequence_mask", correction_low=low, correction_high=high),
        advantages=-torch.ones(2),
        cu_seqlens=torch.tensor([0, 4, 6]),
        rollout_logprobs=-1 - drift.log(),
        normaliser=1.0,
    )
    assert result.coefficient.tolist() == kept and float(result.agent_sums["masked_tokens"]) == kept.count(0)
    assert float(result.agent_sums["tokens"]) == 6  # masked tokens stay in the count


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
    # A token that a correction leaves out is masked, not gated.
    plain = token_marks(logprobs, logprobs, replace(inputs, objective=replace(objective, correction="none")))
    assert torch.equal(marks.gated, plain.gated)
