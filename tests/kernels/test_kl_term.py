"""Gradient and value of the KL term against exact expectations: a softmax over 8 actions, each action its own token.

A token's weight is the probability of its action under the sampling policy, so that sums over tokens are expectations.
"""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from fused_head import policy_loss
from torch import Tensor

from marsrl.kernels import PolicyObjective

POLICY = torch.tensor([3.0, 1, 4, 1, 5, 9, 2, 6], dtype=torch.float64) / 4  # logits of the policy
REFERENCE = torch.tensor([2.0, 7, 1, 8, 2, 8, 1, 8], dtype=torch.float64) / 4
OLDER = POLICY + torch.tensor([0.75, -0.75, 0.75, -0.75, -0.75, 0.75, 0.75, -0.75], dtype=torch.float64)
DRAWN = {"this policy": POLICY, "older weights": OLDER}
ESTIMATES = ("k1", "k2", "k3")
PLAIN = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.expm1(-x) + x}


def exact() -> tuple[float, Tensor]:
    """Return the KL divergence of the policy from the reference, and its gradient with respect to the logits [8]."""
    logits = POLICY.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    divergence = (logp.exp() * (logp - REFERENCE.log_softmax(-1))).sum()
    divergence.backward()
    assert logits.grad is not None
    return divergence.item(), logits.grad


def as_it_stands(kl: str, drawn_by: Tensor) -> Tensor:
    """Return the expected gradient of the estimate without importance weights, as compared in docs/numerics.md."""
    logits = POLICY.clone().requires_grad_()
    x = logits.log_softmax(-1) - REFERENCE.log_softmax(-1)
    (drawn_by.softmax(-1) * PLAIN[kl](x)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def expected(objective: PolicyObjective, drawn_by: Tensor, old: Tensor | None = None) -> tuple[float, Tensor]:
    """Return the expected value and gradient of policy_loss's KL term over all actions."""
    logits = POLICY.clone().requires_grad_()
    rollout = drawn_by.log_softmax(-1)
    result = policy_loss(
        logits.log_softmax(-1).float(),
        torch.zeros(8),
        objective=objective,
        advantages=torch.zeros(8),
        cu_seqlens=torch.arange(9),
        weights=rollout.exp().float(),
        old_logprobs=None if old is None else old.log_softmax(-1).float(),
        rollout_logprobs=rollout.float(),
        reference_logprobs=REFERENCE.log_softmax(-1).float(),
        normaliser=1.0,
    )
    result.loss.backward()
    assert logits.grad is not None
    return result.loss.item(), logits.grad


def off(gradient: Tensor) -> float:
    """Return the distance from the exact gradient, relative to its norm."""
    right = exact()[1]
    return float((gradient - right).norm() / right.norm())


def test_every_kl_estimate_has_a_case() -> None:
    assert get_args(PolicyObjective.__annotations__["kl"]) == ("none", *ESTIMATES)


@pytest.mark.parametrize("kind", ["clip", "cispo"])
@pytest.mark.parametrize("drawn_by", DRAWN)
@pytest.mark.parametrize("kl", ESTIMATES)
def test_the_kl_gradient_is_exact_for_any_sampling_policy(
    kl: str, drawn_by: str, kind: str, implementation: str
) -> None:
    """The gradient is exact for every old policy in the ratio: none (pois, first update), another policy (later updates,
    recompute), or the sampling policy (sais).
    """
    for old in (None, REFERENCE, DRAWN[drawn_by]):
        objective = PolicyObjective(kl=kl, kl_coef=1.0, kind=kind)  # type: ignore[arg-type]
        value, gradient = expected(objective, DRAWN[drawn_by], old)
        assert off(gradient) < 1e-6
        assert kl == "k2" or value == pytest.approx(exact()[0], rel=1e-6)


def test_importance_truncated_by_tis_biases_the_kl_gradient(implementation: str) -> None:
    for high, is_exact in ((2.0, False), (3.2, True)):  # the largest importance is 3.1
        objective = PolicyObjective(kl="k3", kl_coef=1.0, correction="tis", correction_high=high)
        assert (off(expected(objective, OLDER)[1]) < 1e-6) == is_exact


def test_the_table_of_the_kl_estimates_is_right() -> None:
    """docs/numerics.md lists how far expected gradients and values are from the exact ones, in percent."""

    def percent(number: float) -> str:
        return f"{100 * number:.0f} %" if number > 1e-6 else "0"

    rows = []
    for kl in ESTIMATES:
        plain = [off(as_it_stands(kl, logits)) for logits in DRAWN.values()]
        objective = PolicyObjective(kl=kl, kl_coef=1.0)  # type: ignore[arg-type]
        weighted = [expected(objective, logits) for logits in DRAWN.values()]
        truncated = expected(PolicyObjective(kl=kl, kl_coef=1.0, correction="tis"), OLDER)  # type: ignore[arg-type]
        numbers = [*plain, *(off(gradient) for _, gradient in weighted), off(truncated[1])]
        numbers.append(abs(weighted[1][0] / exact()[0] - 1))
        rows.append(f"| `{kl}` | {' | '.join(map(percent, numbers))} |")
    page = (Path(__file__).parents[2] / "docs/numerics.md").read_text("utf-8")
    assert re.findall(r"^\| `k\d` .*", page, re.MULTILINE) == rows
