"""Non-finite numbers in a row of logits, and in each input of the policy objective at each kind of token (PLACES).

Shared by test_every_tier.py (csrc/cpu and the references) and interpreter/test_every_op.py (Triton).
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from fused_head import forced, linear_policy_loss, policy_loss, to_device
from torch import Tensor

from marsrl.kernels import PolicyLoss, PolicyObjective, linear_logprob

ROW, TARGET, OTHER, VOCAB, LARGE = 1, 3, 70, 131, 1e20
KINDS = {
    "nan": {OTHER: torch.nan},
    "+inf": {OTHER: LARGE},
    "+inf at the target": {TARGET: LARGE},
    "-inf": {OTHER: -LARGE},
    "-inf at the target": {TARGET: -LARGE},
    "-inf in all columns": dict.fromkeys(range(VOCAB), -LARGE),
}
FINITE_GRADIENT = ("-inf", "-inf at the target")


def case(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden, weight and targets; logits overflow only in row ROW.

    Its first hidden unit is 1e20; that of other rows is 0. KINDS has the weights that multiply this unit.
    """
    hidden, weight = torch.randn(5, 8), torch.randn(VOCAB, 8)
    hidden[:, 0], weight[:, 0] = 0, 0
    hidden[ROW, 0] = LARGE
    for column, value in KINDS[kind].items():
        weight[column, 0] = 0 if value != value else value
    if kind == "nan":
        hidden[ROW, 1] = torch.nan
    return hidden.requires_grad_(), weight.requires_grad_(), torch.full((5,), TARGET)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
    entropy = -torch.where(logp == -torch.inf, 0.0, logp.exp() * logp).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


def check_logprobs(kind: str) -> None:
    hidden, weight, targets = case(kind)
    found = linear_logprob(hidden, weight, targets)
    logprobs, entropy = plain(hidden.detach(), weight.detach(), targets)
    torch.testing.assert_close(found.logprobs.detach(), logprobs, equal_nan=True)
    torch.testing.assert_close(found.entropy.detach(), entropy, equal_nan=True)
    found.logprobs.sum().backward()
    assert hidden.grad is not None
    others = torch.arange(5) != ROW
    clean = hidden.detach()[others].requires_grad_()
    plain(clean, weight.detach(), targets[others])[0].sum().backward()
    torch.testing.assert_close(hidden.grad[others, 1:], clean.grad[:, 1:])  # the first unit is multiplied by 1e20
    assert bool(hidden.grad[ROW].isfinite().all()) == (kind in FINITE_GRADIENT)


def check_loss(kind: str) -> None:
    """Check that a trained row with a non-finite log-prob makes the loss non-finite, with and without a ratio, and that masked or
    dropped rows are not read.
    """
    for how, old in itertools.product(("trained", "masked", "dropped"), (torch.full((5,), -3.0), None)):
        hidden, weight, targets = case(kind)
        left_out = torch.arange(5) == ROW
        result = linear_policy_loss(
            hidden,
            weight,
            targets,
            objective=PolicyObjective(mpt_probability=None),
            cu_seqlens=torch.tensor([0, 2, 5]),
            advantages=torch.tensor([1.0, -1.0]),
            mask=~left_out if how == "masked" else None,
            dropped=left_out if how == "dropped" else None,
            old_logprobs=old,
            normaliser=5.0,
        )
        result.loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        assert bool(result.loss.isfinite()) == (how != "trained" or kind == "-inf"), (kind, how)
        if how != "trained":
            assert weight.grad.isfinite().all() and not hidden.grad[ROW].any()


# name -> (objective, has old log-probs): the options that decide which inputs are read
SETTINGS: dict[str, tuple[PolicyObjective, bool]] = {
    f"correction {correction}, kl {kl}, ratio {ratio}, {number}": (
        PolicyObjective(
            kind="cispo" if number % 4 == 0 else "clip",
            ratio="sequence" if ratio == "sequence" else "token",
            correction=correction,  # type: ignore[arg-type]
            kl=kl,  # type: ignore[arg-type]
            kl_coef=0.1,
            entropy_coef=0.05 if number % 2 == 0 else 0.0,
            dual_clip=3.0 if kl == "k2" else None,
        ),
        ratio != "none",
    )
    for number, (correction, kl, ratio) in enumerate(
        itertools.product(
            ("none", "tis", "icepop", "sequence_mask"), ("none", "k1", "k2", "k3"), ("none", "token", "sequence")
        )
    )
}
FEW = list(SETTINGS)[::5]  # each value of each field, and each correction with and without old log-probs
PLACES = ("trained", "mask off", "dropped", "gated", "removed")  # removed: masked by a correction
VALUES = (torch.nan, torch.inf, -torch.inf)


def reads(objective: PolicyObjective, has_old: bool) -> dict[str, tuple[bool, ...]]:
    """Return for each input whether it is read at each of PLACES.

    A non-finite value that is read makes loss and coefficient non-finite.
    """
    corrects, has_kl = objective.correction != "none", objective.kl != "none"
    return {
        "logprobs": (True, False, False, True, not has_old),
        "entropy": (objective.entropy_coef > 0, False, False, False, False),
        "token_advantages": (True, False, False, False, False),
        "weights": (True, False, False, False, False),
        "old_logprobs": (has_old, False, False, False, has_old),
        "rollout_logprobs": (corrects or has_kl, False, False, False, corrects),
        "reference_logprobs": (has_kl, False, False, False, False),
    }


@dataclass(frozen=True)
class Spot:
    """A non-finite number at a token that has a sequence of its own."""

    name: str
    place: str
    value: float
    is_read: bool


def inputs_of(objective: PolicyObjective, has_old: bool, chosen: list[Spot]) -> dict[str, Any]:
    """Return arguments of policy_loss: one sequence of one token for each spot, after a finite sequence of three tokens. Each
    sequence is its own agent.
    """
    total = 3 + len(chosen)

    def tokens_that_are(where: str) -> Tensor:
        return torch.tensor([False] * 3 + [spot.place == where for spot in chosen])

    logprobs = torch.full((total,), -1.5).masked_fill(tokens_that_are("gated"), -1e-4)
    old = logprobs + 0.1
    rollout = (old if has_old else logprobs) + 0.1
    rollout[tokens_that_are("removed")] -= 4.0  # ratio d = e^3.9, outside the correction's band
    numbers: dict[str, Any] = {
        "logprobs": logprobs.clone(),
        "entropy": torch.ones(total),
        "token_advantages": torch.full((total,), -0.5),
        "weights": torch.ones(1 + len(chosen)),
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "reference_logprobs": logprobs - 0.2,
    }
    for number, spot in enumerate(chosen):
        numbers[spot.name][number + (1 if spot.name == "weights" else 3)] = spot.value
    if not has_old:
        numbers["old_logprobs"] = None
    return numbers | {
        "objective": objective,
        "cu_seqlens": torch.tensor([0, *range(3, total + 1)]),
        "agent_of": torch.arange(1 + len(chosen)),
        "num_agents": 1 + len(chosen),
        "normaliser": 8.0,
        "mask": ~tokens_that_are("mask off"),
        "dropped": tokens_that_are("dropped"),
        "gate": tokens_that_are("gated")[2:],
    }


def judge(chosen: list[Spot], result: PolicyLoss) -> None:
    """Check the effect of every spot on its agent's loss and its token's coefficient.

    A spot that is read makes both non-finite. With any other spot they are finite, and the coefficient is 0 unless the token is
    trained.
    """
    losses, coefficient = result.agent_sums["loss"], result.coefficient
    assert losses[0].isfinite() and coefficient[:3].isfinite().all() and coefficient[:3].all()
    for spot, loss, slope in zip(chosen, losses[1:], coefficient[3:], strict=True):
        message = f"{spot}: loss {loss}, coefficient {slope}"
        assert bool(loss.isfinite()) == bool(slope.isfinite()) != spot.is_read, message
        assert spot.is_read or spot.place == "trained" or slope == 0, message
    assert bool(result.loss.isfinite()) != any(spot.is_read for spot in chosen)


def check_given_logprobs(setting: str, implementation: str, device: str = "cpu") -> None:
    """Check policy_loss, forward and backward, with all spots, and with only the spots that are not read."""
    objective, has_old = SETTINGS[setting]
    everywhere = [
        Spot(name, place, value, is_read)
        for name, at_places in reads(objective, has_old).items()
        for place, is_read in zip(PLACES, at_places, strict=True)
        for value in VALUES
        if place != "removed" or objective.correction in ("icepop", "sequence_mask")
    ]
    for chosen in (everywhere, [spot for spot in everywhere if not spot.is_read]):
        inputs = to_device(inputs_of(objective, has_old, chosen), device)
        logprobs, entropy = (inputs.pop(name).requires_grad_() for name in ("logprobs", "entropy"))
        with forced(implementation):
            result = policy_loss(logprobs, entropy, **inputs)
        result.loss.backward()
        judge(chosen, result)
        torch.testing.assert_close(logprobs.grad, result.coefficient, equal_nan=True)
        if chosen is not everywhere:
            masked = torch.tensor([False] * 3 + [spot.place != "trained" for spot in chosen])
            assert not logprobs.grad[masked].any() and not entropy.grad[masked].any()
            assert logprobs.grad.isfinite().all() and entropy.grad.isfinite().all()
