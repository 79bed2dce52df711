"""Log-ratios beyond LOG_RATIO_BOUND: loss, gradient and count of one token, worked out by hand."""

import math
from typing import Any

import pytest
import torch
from fused_head import forced, policy_loss

from marsrl.kernels import PolicyObjective

E20 = math.exp(20)
WIDE = {"correction_low": 0.0, "correction_high": 1e12}
# log-prob -1 throughout. name -> objective, advantage, what is given, (loss, slope, clamped tokens)
CASES: dict[str, tuple[PolicyObjective, float, dict[str, float], tuple[float, float, int]]] = {
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
    "tis": (PolicyObjective(correction="tis"), 1.0, {"rollout": -101}, (-2, -2, 1)),
    "tis with a wide cap": (PolicyObjective(correction="tis", **WIDE), 1.0, {"rollout": -101}, (-E20, -E20, 1)),
    "tis below": (PolicyObjective(correction="tis"), 1.0, {"rollout": 99}, (-1 / E20, -1 / E20, 1)),
    "icepop counts it as masked": (PolicyObjective(correction="icepop"), 1.0, {"rollout": -101}, (0, 0, 0)),
    "icepop with a wide band": (PolicyObjective(correction="icepop", **WIDE), 1.0, {"rollout": -101}, (-1, -1, 1)),
    "sequence_mask": (PolicyObjective(correction="sequence_mask", **WIDE), 1.0, {"rollout": -101}, (-1, -1, 1)),
    "k3 above": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": -31}, (9.5 + 0.5 / E20, 0, 1)),
    "k3 below": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": 99}, (0.5 * (E20 - 21), 0, 1)),
    "k3 inside": (PolicyObjective(kl="k3", kl_coef=0.5), 0.0, {"reference": -2}, (0.5 / math.e, 0.5 - 0.5 / math.e, 0)),
    "k1 is not clamped": (PolicyObjective(kl="k1", kl_coef=0.5), 0.0, {"reference": -31}, (15, 0.5, 0)),
    "k2 is not clamped": (PolicyObjective(kl="k2", kl_coef=0.5), 0.0, {"reference": -31}, (225, 15, 0)),
}  # fmt: skip


def one_token(logprob: float, advantage: float, objective: PolicyObjective, **inputs: Any) -> tuple[float, float, Any]:
    """Loss and slope of a single token, and the whole result."""
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
    assert logprobs.grad is not None
    return result.loss.item(), logprobs.grad.item(), result


def check_clamp(name: str, implementation: str) -> None:
    objective, advantage, given, expected = CASES[name]
    inputs: dict[str, Any] = {f"{key}_logprobs": torch.tensor([float(value)]) for key, value in given.items()}

    def run(**more: Any) -> tuple[float, float, float]:
        with forced(implementation):
            loss, slope, found = one_token(-1.0, advantage, objective, **inputs, **more)
        assert slope == found.coefficient.item()
        return loss, slope, found.agent_sums["clamped_tokens"].item()

    assert run() == pytest.approx(expected, rel=1e-5)
    assert run(dropped=torch.tensor([True])) == (0, 0, 0)  # what is masked is counted as that alone
