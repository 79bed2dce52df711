"""Other projects' implementations: how to call each, or the reason why one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

LogprobFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class LogprobPeer:
    """call(hidden [T, H], weight [V, H], targets [T]) -> (log-probs [T], entropy [T] or None), differentiable.

    has_entropy_gradient: autograd reaches the entropy too.
    """

    name: str
    call: LogprobFunction
    has_entropy_gradient: bool = False


@dataclass(frozen=True)
class CrossEntropyPeer:
    """call(hidden, weight, targets) -> mean cross-entropy, differentiable: no weights of tokens, no ratio, no entropy.

    Cheaper by design; listed for orientation, not as an equal.
    """

    name: str
    call: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PolicyProblem:
    """Inputs of a clipped policy loss of S sequences of equal length.

    hidden [T, H], weight [V, H]: leaves; targets [T]; mask [T] bool or None; old_logprobs [T] float32, nats;
    advantages [S] float32. The loss is the sum over the mask / its count.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    mask: Tensor | None
    old_logprobs: Tensor
    advantages: Tensor
    clip: float
    num_trained: int

    @property
    def num_sequences(self) -> int:
        return self.advantages.numel()


@dataclass(frozen=True)
class PolicyLossPeer:
    """call(problem) -> the loss, differentiable; prepared: computes constants once."""

    name: str
    prepared: Callable[[PolicyProblem], Callable[[], Tensor]]


Peer = LogprobPeer | CrossEntropyPeer | PolicyLossPeer


def flash_attn(name: str) -> Callable[..., Tensor] | str:
    """flash-attn's function of this name, or why not."""
    if importlib.util.find_spec("flash_attn") is None:
        return "ModuleNotFoundError: No module named 'flash_attn'"
    try:
        function: Callable[..., Tensor] = getattr(importlib.import_module("flash_attn"), name)
    except Exception as error:  # it is a compiled extension: it may not fit this torch
        return why_not_imported(error)
    return function


def why_not_imported(error: Exception) -> str:
    """One line for the table."""
    text = str(error).strip()
    first = text.splitlines()[0][:160] if text else ""
    return f"{type(error).__name__}: {first}"
