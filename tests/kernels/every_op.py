"""Small calls of every op, forward and backward. `resized` cuts them to fewer tokens, or to none."""

import os
import re

import pytest
import torch
from layout_cases import HEADS, MORE, OPS, TOKENS, Taken, Tensors, results, tensors_of
from torch import Tensor

from marsrl.kernels import explain

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CALLS: dict[str, Taken] = {**HEADS, **MORE, **OPS}
WITHOUT_TIERS = ("pack", "kept_rows")
"""Ops without implementations to choose from: they consist of PyTorch's operations, on any device."""


def force(monkeypatch: pytest.MonkeyPatch, name: str, tier: str) -> None:
    """Make the implementation `tier` serve the op of the call `name`."""
    if _op(name) not in WITHOUT_TIERS:
        monkeypatch.setenv("MARSRL_KERNELS", f"{_op(name)}={tier}")


def _op(name: str) -> str:
    """Return the name of the Op behind a call of this name."""
    op = re.split("[ ,]", name)[0]
    return "sequence_sums" if op == "mpt_gate" else op


_EXPLAINED = {each.op: each for each in explain()}


def that_run_here(name: str) -> list[str]:
    """Return the implementations that run here: only Triton's if Triton is interpreted, otherwise all others."""
    if _op(name) in WITHOUT_TIERS:
        return [] if IS_INTERPRETED else ["reference"]
    explained = _EXPLAINED[_op(name)]
    preferred = [tier for tier, reason in explained.reasons.items() if reason.endswith(" is preferred")]
    tiers = [
        tier for tier in (explained.chosen, *preferred) if tier is not None and (tier == "triton") == IS_INTERPRETED
    ]
    # The reference leaves the weight's gradient to autograd.
    return [tier for tier in tiers if not ("main_grad" in name and tier == "reference")]


TIERS = [(name, tier) for name in CALLS for tier in that_run_here(name)]
# A leaf's gradient is a result unless it went to main_grad.
WITH_GRADIENTS = [(name, tier) for name, tier in TIERS if CALLS[name].leaves and "main_grad" not in name]


def resized(tensors: Tensors, num_tokens: int) -> Tensors:
    """Return the call's tensors cut to their first num_tokens tokens. The last sequence and the last expert get the remainder."""
    cut = dict(tensors)
    for which, values in tensors.items():
        if which.startswith("cu_seqlens"):
            cut[which] = values.clamp(max=num_tokens)
            cut[which][-1] = num_tokens
        elif which == "tokens_per_expert":
            first = min(int(values[0]), num_tokens)
            cut[which] = torch.tensor([first, num_tokens - first])
        elif values.shape[:1] == (TOKENS,):
            cut[which] = values[torch.arange(num_tokens) % TOKENS]
    return cut


def call(name: str) -> list[Tensor]:
    return results(CALLS[name], tensors_of(CALLS[name]))


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
