"""Numbers that are not finite: in a row of logits, and in each input of the policy objective at each place it can stand at.

Shared by test_every_tier.py (csrc/cpu and the references) and interpreter/test_every_op.py (Triton).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fused_head import forced, linear_policy_loss, policy_loss, to_device
from torch import Tensor

from marsrl.kernels import PolicyLoss, PolicyObjective, linear_logprob

# A row of logits.

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
    """hidden, weight, targets: products of 1e20 overflow, in row ROW alone, the one that the first hidden unit is for."""
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
    torch.testing.assert_close(hidden.grad[others, 1:], clean.grad[:, 1:])  # the first unit meets 1e20
    assert bool(hidden.grad[ROW].isfinite().all()) == (kind in FINITE_GRADIENT)


def check_loss(kind: str) -> None:
    """A trained row whose log-prob is not finite makes a loss that is not, with and without a ratio. One that is masked or
    dropped is not read."""
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


# The inputs of the objective.


@dataclass(frozen=True)
class Setting:
    """The options that decide which inputs are read. ratio: "none" is pseudo on-policy, without old log-probs."""

    correction: str = "none"
    kl: str = "none"
    ratio: str = "token"
    has_bonus: bool = False
    kind: str = "clip"

    def __str__(self) -> str:
        parts = [f"correction {self.correction}", f"kl {self.kl}", f"ratio {self.ratio}"]
        return ", ".join(parts + ["bonus"] * self.has_bonus + ["cispo"] * (self.kind == "cispo"))

    @property
    def objective(self) -> PolicyObjective:
        return PolicyObjective(
            kind=self.kind,  # type: ignore[arg-type]
            ratio="sequence" if self.ratio == "sequence" else "token",
            correction=self.correction,  # type: ignore[arg-type]
            kl=self.kl,  # type: ignore[arg-type]
            kl_coef=0.1,
            entropy_coef=0.05 if self.has_bonus else 0.0,
            dual_clip=3.0 if self.kl == "k2" else None,
        )


PRODUCT = itertools.product(
    ("none", "tis", "icepop", "sequence_mask"), ("none", "k1", "k2", "k3"), ("none", "token", "sequence")
)
SETTINGS = [
    Setting(*each, has_bonus=number % 2 == 0, kind="cispo" if number % 4 == 0 else "clip")
    for number, each in enumerate(PRODUCT)
]
FEW = SETTINGS[::5]  # each value of each field, and each correction with old log-probs and without
WHEN: dict[str, Callable[[Setting], bool]] = {
    "always": lambda setting: True,
    "never": lambda setting: False,
    "where given": lambda setting: setting.ratio != "none",
    "without an old log-prob": lambda setting: setting.ratio == "none",
    "with a correction": lambda setting: setting.correction != "none",
    "with a KL term": lambda setting: setting.kl != "none",
    "with an entropy bonus": lambda setting: setting.has_bonus,
}
PLACES = ("trained", "mask off", "dropped", "gated", "removed")  # removed: masked by a correction
READ = {  # input -> when it is read at each of PLACES: then loss and coefficient are not finite
    "log-prob": ("always", "never", "never", "always", "without an old log-prob"),
    "entropy": ("with an entropy bonus", "never", "never", "never", "never"),
    "advantage": ("always", "never", "never", "never", "never"),
    "weight": ("always", "never", "never", "never", "never"),
    "old log-prob": ("where given", "never", "never", "never", "where given"),
    "rollout log-prob": ("with a correction", "never", "never", "never", "with a correction"),
    "reference log-prob": ("with a KL term", "never", "never", "never", "never"),
}
VALUES = (torch.nan, torch.inf, -torch.inf)


@dataclass(frozen=True)
class Spot:
    """One number that is not finite, of a token in a sequence of its own."""

    name: str
    place: str
    value: float

    def is_read(self, setting: Setting) -> bool:
        return WHEN[READ[self.name][PLACES.index(self.place)]](setting)


@dataclass
class Batch:
    """Sequences of one token, behind three tokens of a sequence without anything that is not finite.

    inputs: of policy_loss beside log-probs and entropy; each sequence is an agent. at [number of spots]: their tokens.
    """

    spots: list[Spot]
    at: Tensor
    logprobs: Tensor
    entropy: Tensor
    inputs: dict[str, Any]


def batch_of(setting: Setting, chosen: list[Spot]) -> Batch:
    total = 3 + len(chosen)
    cu_seqlens, at = torch.tensor([0, *range(3, total + 1)]), torch.arange(3, total)

    def of(place: str) -> Tensor:
        return torch.tensor([False] * 3 + [spot.place == place for spot in chosen])

    logprobs = torch.full((total,), -1.5).masked_fill(of("gated"), -1e-4)
    old = logprobs + 0.1
    rollout = (old if setting.ratio != "none" else logprobs) + 0.1
    rollout[of("removed")] -= 4.0  # d = e^4
    numbers = {
        "log-prob": logprobs.clone(),
        "entropy": torch.ones(total),
        "advantage": torch.full((total,), -0.5),
        "weight": torch.ones(1 + len(chosen)),
        "old log-prob": old,
        "rollout log-prob": rollout,
        "reference log-prob": logprobs - 0.2,
    }
    for number, (spot, token) in enumerate(zip(chosen, at.tolist()), 1):
        numbers[spot.name][number if spot.name == "weight" else token] = spot.value
    inputs = {
        "objective": setting.objective,
        "cu_seqlens": cu_seqlens,
        "agent_of": torch.arange(1 + len(chosen)),
        "num_agents": 1 + len(chosen),
        "normaliser": 8.0,
        "mask": ~of("mask off"),
        "dropped": of("dropped"),
        "gate": of("gated")[2:],
        "token_advantages": numbers["advantage"],
        "weights": numbers["weight"],
        "old_logprobs": numbers["old log-prob"] if setting.ratio != "none" else None,
        "rollout_logprobs": numbers["rollout log-prob"],
        "reference_logprobs": numbers["reference log-prob"],
    }
    return Batch(chosen, at, numbers["log-prob"], numbers["entropy"], inputs)


def judge(setting: Setting, batch: Batch, found: PolicyLoss) -> None:
    """A spot that is read makes its agent's loss and its own coefficient not finite; any other adds 0 to them."""
    losses, coefficient = found.agent_sums["loss"], found.coefficient
    assert losses[0].isfinite() and coefficient[:3].isfinite().all() and coefficient[:3].all(), str(setting)
    for agent, (spot, token) in enumerate(zip(batch.spots, batch.at.tolist()), 1):
        message = f"{setting}: {spot}: loss {losses[agent]}, coefficient {coefficient[token]}"
        assert bool(losses[agent].isfinite()) != spot.is_read(setting), message
        assert bool(coefficient[token].isfinite()) != spot.is_read(setting), message
        assert spot.is_read(setting) or spot.place == "trained" or coefficient[token] == 0, message
    assert bool(found.loss.isfinite()) != any(spot.is_read(setting) for spot in batch.spots), str(setting)


def check_given_logprobs(setting: Setting, implementation: str, device: str = "cpu") -> None:
    """policy_loss, forward and backward: all spots, and those alone that are not read."""
    places = [place for place in PLACES if place != "removed" or setting.correction in ("icepop", "sequence_mask")]
    everywhere = [Spot(*each) for each in itertools.product(READ, places, VALUES)]
    for chosen in (everywhere, [spot for spot in everywhere if not spot.is_read(setting)]):
        batch = batch_of(setting, chosen)
        logprobs, entropy = (each.to(device).requires_grad_() for each in (batch.logprobs, batch.entropy))
        with forced(implementation):
            found = policy_loss(logprobs, entropy, **to_device(batch.inputs, device))
        found.loss.backward()
        assert logprobs.grad is not None and entropy.grad is not None
        judge(setting, batch, found)
        torch.testing.assert_close(logprobs.grad, found.coefficient, equal_nan=True)
        if chosen is not everywhere:
            masked = batch.at[torch.tensor([spot.place != "trained" for spot in chosen])]
            assert not logprobs.grad[masked].any() and not entropy.grad[masked].any(), str(setting)
            assert logprobs.grad.isfinite().all() and entropy.grad.isfinite().all(), str(setting)
