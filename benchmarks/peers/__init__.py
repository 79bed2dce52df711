"""Other projects' implementations: how to call each, or the reason why one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from head_problem import HeadInputs, LogprobFunction
from torch import Tensor


@dataclass(frozen=True)
class LogprobPeer:
    """A function that returns log-probs. does: a description, if it does less than ours."""

    name: str
    call: LogprobFunction
    does: str = ""


@dataclass(frozen=True)
class LossPeer:
    """prepared(inputs) computes constants once; what it returns computes the loss, differentiable.

    is_ours: the clipped loss over the mask, with the clip range given; else another loss, listed for orientation.
    """

    name: str
    prepared: Callable[[HeadInputs, float], Callable[[], Tensor]]
    is_ours: bool = True


Peer = LogprobPeer | LossPeer


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
