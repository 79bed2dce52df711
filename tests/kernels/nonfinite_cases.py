"""Numbers that are not finite: in a row of logits, and in each input of the policy objective at each place it can stand at.

Shared by test_every_tier.py (csrc/cpu and the references) and interpreter/test_every_op.py (Triton).
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """A trained row whose log-prob is not finite makes a loss that is not, with and without a ratio. A masked one is not read."""
    mask = torch.ones(5, dtype=torch.bool)
    for is_trained, old in itertools.product((True, False), (torch.full((5,), -3.0), None)):
        mask[ROW] = is_trained
        hidden, weight, targets = case(kind)
        result = linear_policy_loss(
            hidden,
            weight,
            targets,
            objective=PolicyObjective(mpt_probability=None),
            cu_seqlens=torch.tensor([0, 2, 5]),
            advantages=torch.tensor([1.0, -1.0]),
            mask=mask,
            old_logprobs=old,
            normaliser=5.0,
        )
        result.loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        assert bool(result.loss.isfinite()) == (not is_trained or kind == "-inf"), (kind, is_trained)
        if not is_trained:
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
    def has_means(self) -> bool:
        return self.ratio == "sequence" or self.correction == "sequence_mask"

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
    Setting(*each, has_bonus=number % 2 == 0, kind="cispo" if number % 5 == 0 else "clip")
    for number, each in enumerate(PRODUCT)
]
FEW = [  # each value of each field, and each correction with old log-probs and without
    Setting("tis", "none", "token"),
    Setting("tis", "k3", "none", has_bonus=True),
    Setting("icepop", "k1", "none"),
    Setting("icepop", "none", "token", has_bonus=True, kind="cispo"),
    Setting("sequence_mask", "k2", "token"),
    Setting("sequence_mask", "none", "none"),
    Setting("none", "k3", "sequence"),
]
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
    """One number that is not finite, in a sequence of its own. has_sibling: the sequence has a trained token behind it."""

    name: str
    place: str
    value: float
    has_sibling: bool

    def is_read(self, setting: Setting) -> bool:
        return WHEN[READ[self.name][PLACES.index(self.place)]](setting)

    def is_read_by_sibling(self, setting: Setting) -> bool:
        """A weight is of the sequence; so are a mean of log-ratios and one of log-drifts, of all its tokens in the mask."""
        is_in_mean = self.place != "mask off"
        has_old = setting.ratio != "none"
        of_ratio = setting.ratio == "sequence" and self.name in ("log-prob", "old log-prob")
        trainer = "old log-prob" if has_old else "log-prob"
        of_drift = setting.correction == "sequence_mask" and self.name in (trainer, "rollout log-prob")
        is_removed = self.place == "removed" and setting.correction == "sequence_mask" and not self.is_read(setting)
        return not is_removed and (self.name == "weight" or (is_in_mean and (of_ratio or of_drift)))


@dataclass
class Batch:
    """Sequences of one token, or of two, behind three tokens of a sequence without anything that is not finite.

    inputs: of policy_loss beside log-probs and entropy; each sequence is an agent. at [number of spots]: their tokens.
    """

    spots: list[Spot]
    at: Tensor
    logprobs: Tensor
    entropy: Tensor
    inputs: dict[str, Any]


def batch_of(setting: Setting, chosen: list[Spot], logprobs: Tensor | None = None) -> Batch:
    """logprobs: of the tokens, as a head finds them; None: some."""
    sizes = torch.tensor([3] + [1 + spot.has_sibling for spot in chosen])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    at, total = cu_seqlens[1:-1], int(cu_seqlens[-1])
    places = [spot.place for spot in chosen]
    if logprobs is None:
        logprobs = torch.full((total,), -1.5)
        logprobs[at[torch.tensor([place == "gated" for place in places], dtype=torch.bool)]] = -1e-4
    old = logprobs + 0.1
    trainer = old if setting.ratio != "none" else logprobs
    rollout = trainer + 0.1
    flags = {name: torch.zeros(total, dtype=torch.bool) for name in ("mask off", "dropped", "removed")}
    for spot, token in zip(chosen, at.tolist()):
        if spot.place in flags:
            flags[spot.place][token] = True
    rollout[flags["removed"]] -= 4.0  # d = e^4; the mean with a sibling's is e^2
    numbers = {
        "log-prob": logprobs.clone(),
        "entropy": torch.ones(total),
        "advantage": torch.full((total,), -0.5),
        "weight": torch.ones(len(sizes)),
        "old log-prob": old,
        "rollout log-prob": rollout,
        "reference log-prob": logprobs - 0.2,
    }
    for number, (spot, token) in enumerate(zip(chosen, at.tolist()), 1):
        numbers[spot.name][number if spot.name == "weight" else token] = spot.value
    inputs = {
        "objective": setting.objective,
        "cu_seqlens": cu_seqlens,
        "agent_of": torch.arange(len(sizes)),
        "num_agents": len(sizes),
        "normaliser": 8.0,
        "mask": ~flags["mask off"],
        "dropped": flags["dropped"],
        "gate": torch.tensor([False] + [place == "gated" for place in places]),
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
    any_read = False
    for agent, (spot, token) in enumerate(zip(batch.spots, batch.at.tolist()), 1):
        is_read, by_sibling = spot.is_read(setting), spot.has_sibling and spot.is_read_by_sibling(setting)
        any_read |= is_read or by_sibling
        message = (
            f"{setting}: {spot}: loss {losses[agent]}, coefficients {coefficient[token : token + 1 + spot.has_sibling]}"
        )
        assert bool(losses[agent].isfinite()) != (is_read or by_sibling), message
        assert bool(coefficient[token].isfinite()) != is_read, message
        assert is_read or spot.place == "trained" or coefficient[token] == 0, message
        assert not spot.has_sibling or bool(coefficient[token + 1].isfinite()) != by_sibling, message
    assert bool(found.loss.isfinite()) != any_read, str(setting)


def selections(setting: Setting, names: tuple[str, ...]) -> Iterator[tuple[list[Spot], bool]]:
    """(spots, whether none of them is read): all, and those that are not read; with siblings too where a mean is read."""
    for has_sibling in (False, True)[: 1 + setting.has_means]:
        places = [place for place in PLACES if place != "removed" or setting.correction in ("icepop", "sequence_mask")]
        everywhere = [Spot(*each, has_sibling) for each in itertools.product(names, places, VALUES)]
        yield everywhere, False
        yield (
            [
                spot
                for spot in everywhere
                if not spot.is_read(setting) and not (has_sibling and spot.is_read_by_sibling(setting))
            ],
            True,
        )


def check_given_logprobs(setting: Setting, implementation: str, device: str = "cpu") -> None:
    """policy_loss, forward and backward."""
    for chosen, none_is_read in selections(setting, tuple(READ)):
        batch = batch_of(setting, chosen)
        logprobs, entropy = (each.to(device).requires_grad_() for each in (batch.logprobs, batch.entropy))
        with forced(implementation):
            found = policy_loss(logprobs, entropy, **to_device(batch.inputs, device))
        found.loss.backward()
        assert logprobs.grad is not None and entropy.grad is not None
        judge(setting, batch, found)
        torch.testing.assert_close(logprobs.grad, found.coefficient, equal_nan=True)
        if none_is_read:
            masked = batch.at[torch.tensor([spot.place != "trained" for spot in chosen])]
            assert not logprobs.grad[masked].any() and not entropy.grad[masked].any(), str(setting)
            assert logprobs.grad.isfinite().all() and entropy.grad.isfinite().all(), str(setting)


def check_head(setting: Setting, design: str) -> None:
    """linear_policy_loss, forward and backward; a log-prob that is not finite is one of a hidden state that is not."""
    implementation, _, how = design.partition(" ")
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    names = tuple(name for name in READ if name != "entropy")
    # a multiple of 32: the CPU's own bfloat16 products, where it has them
    for vocab in (67, 96) if how == "bfloat16" else (67,):
        for chosen, none_is_read in selections(setting, names):
            _check_head_batch(setting, chosen, implementation, dtype, none_is_read, vocab)


def _check_head_batch(
    setting: Setting,
    chosen: list[Spot],
    implementation: str,
    dtype: torch.dtype,
    none_is_read: bool,
    vocab: int,
) -> None:
    finite = batch_of(setting, [replace(s, value=0.0, name="advantage") for s in chosen])
    total = finite.logprobs.numel()
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, 8, generator=generator).to(dtype)
    hidden = (0.3 * torch.randn(total, 8, generator=generator)).to(dtype)
    targets = torch.randint(0, vocab, (total,), generator=generator)
    gated = finite.at[torch.tensor([s.place == "gated" for s in chosen], dtype=torch.bool)]
    directions = torch.nn.functional.normalize(weight[targets[gated]].float(), dim=1)
    weight[targets[gated]] = (20 * directions).to(dtype)
    hidden[gated] = (20 * directions).to(dtype)
    logp, _ = plain(hidden.double(), weight.double(), targets)
    batch = batch_of(setting, chosen, logp.float())
    for spot, token in zip(chosen, batch.at.tolist()):
        if spot.name == "log-prob":
            hidden[token] = spot.value
    hidden.requires_grad_(), weight.requires_grad_()
    with forced(f"linear_policy_loss={implementation}"):
        found = linear_policy_loss(hidden, weight, targets, **batch.inputs)
    found.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    judge(setting, batch, found)
    assert hidden.grad[:3].isfinite().all(), str(setting)
    silent = torch.tensor([s.place != "trained" and not s.is_read(setting) for s in chosen])
    assert not hidden.grad[batch.at[silent]].any(), str(setting)
    if none_is_read:
        assert weight.grad.isfinite().all() and hidden.grad.isfinite().all() and weight.grad.any(), str(setting)
