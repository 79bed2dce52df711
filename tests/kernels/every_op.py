"""A small call of every op, forward and backward, and a batch without tokens of those that have a gradient."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from layout_cases import HEADS as LAID_OUT_HEADS
from layout_cases import MORE_HEADS, OPS, TOKENS, results
from torch import Tensor

from marsrl.kernels import explain

HEADS = {name: partial(results, op) for name, op in {**LAID_OUT_HEADS, **MORE_HEADS}.items()}
CALLS: dict[str, Callable[[], list[Tensor]]] = {**HEADS, **{name: partial(results, op) for name, op in OPS.items()}}


WITHOUT_TIERS = ("pack", "kept_rows")
"""PyTorch's operations, whatever the device."""


def force(monkeypatch: pytest.MonkeyPatch, name: str, tier: str) -> None:
    """The op of this call is served by that implementation."""
    if _ops(name)[0] not in WITHOUT_TIERS:
        monkeypatch.setenv("MARSRL_KERNELS", ",".join(f"{op}={tier}" for op in _ops(name)))


def _ops(name: str) -> tuple[str, ...]:
    """Names of the Ops behind a call of that name."""
    op = re.split("[ ,]", name)[0]
    return ("sequence_sums",) if op == "mpt_gate" else (op,)


def that_run_here(name: str) -> list[str]:
    """Implementations that this machine does not lack, unless they are Triton's: the interpreter's tests take these."""
    if _ops(name)[0] in WITHOUT_TIERS:
        return ["reference"]
    found = next(each for each in explain() if each.op == _ops(name)[0])
    preferred = [tier for tier, reason in found.reasons.items() if reason.endswith(" is preferred")]
    tiers = [tier for tier in (found.chosen, *preferred) if tier not in (None, "triton")]
    # the reference leaves the gradient of the weight to autograd
    return [tier for tier in tiers if not ("main_grad" in name and tier == "reference")]


TIERS = [(name, tier) for name in CALLS for tier in that_run_here(name)]


def check_autocast_changes_nothing(name: str) -> None:
    """Forward and backward have the same dtypes and bits."""
    expected = CALLS[name]()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    same(found, expected)


EMPTY = [name for name, op in OPS.items() if op.leaves and "main_grad" not in name]
EMPTY_TIERS = [(name, tier) for name in EMPTY for tier in that_run_here(name)]


def check_an_empty_batch_has_gradients_of_zero(name: str) -> None:
    """The call without a token: nothing of what is one a token, and no token in any sequence or for any expert."""
    op, tensors = OPS[name], OPS[name].tensors()
    for which, values in tensors.items():
        if which in ("cu_seqlens", "counts"):
            tensors[which] = torch.zeros_like(values)
        elif values.shape[:1] == (TOKENS,):
            tensors[which] = values[:0]
    leaves = [tensors[which].requires_grad_() for which in op.leaves]
    ends = [each.sum() for each in op.run(tensors) if each.requires_grad]
    assert ends
    for leaf, grad in zip(leaves, torch.autograd.grad(ends, leaves), strict=True):
        assert grad.shape == leaf.shape and not grad.any()


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check_the_defaults_are_not_used(name: str) -> None:
    """A tensor that an op makes without naming its device would be on the default one, here without memory; without naming
    its dtype it would be of the default one, and kernels would write 4 bytes a number whatever room there is."""
    expected = CALLS[name]()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = CALLS[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, expected)
