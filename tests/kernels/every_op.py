"""A small call of every op, forward and backward, and a batch without tokens of those that have a gradient."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from layout_cases import HEADS as LAID_OUT_HEADS
from layout_cases import MORE_HEADS, OPS, SIZE, VOCAB, results
from torch import Tensor

from marsrl.kernels import (
    LossInputs,
    PolicyObjective,
    attention_varlen,
    explain,
    grouped_linear,
    linear_logprob,
    linear_policy_loss,
    policy_loss,
    rms_norm,
    swiglu,
)

HEADS = {name: partial(results, op) for name, op in {**LAID_OUT_HEADS, **MORE_HEADS}.items()}
CALLS: dict[str, Callable[[], list[Tensor]]] = {**HEADS, **{name: partial(results, op) for name, op in OPS.items()}}


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cpu").requires_grad_()


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


WITHOUT_TIERS = ("pack", "kept_rows")
"""PyTorch's operations, whatever the device."""


def force(monkeypatch: pytest.MonkeyPatch, name: str, tier: str) -> None:
    """The op of this call is served by that implementation."""
    if _ops(name)[0] not in WITHOUT_TIERS:
        monkeypatch.setenv("MARSRL_KERNELS", ",".join(f"{op}={tier}" for op in _ops(name)))


def _ops(name: str) -> tuple[str, ...]:
    """What Op calls the op of a call of that name."""
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
    """Of forward and backward, dtypes and bits."""
    expected = CALLS[name]()
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name]()
    same(found, expected)


def _no_keys(cu_seqlens: Tensor, num_keys: int = 0) -> tuple[Tensor, list[Tensor]]:
    q, k, v = _leaf(0, 4, 16), _leaf(num_keys, 2, 16), _leaf(num_keys, 2, 16)
    bounds_k = _ints(0, num_keys) if num_keys else None
    return attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k=bounds_k), [q, k, v]


def _of_empty_head(has_loss: bool) -> tuple[Tensor, list[Tensor]]:
    hidden, weight = _leaf(0, SIZE), _leaf(VOCAB, SIZE)
    if has_loss:
        inputs = LossInputs(PolicyObjective(), _ints(0, 0), 7.0, advantages=torch.ones(1))
        return linear_policy_loss(hidden, weight, _ints(), inputs).loss, [hidden, weight]
    found = linear_logprob(hidden, weight, _ints())
    return found.logprobs.sum() + found.entropy.sum(), [hidden, weight]


def _of_no_logprobs() -> tuple[Tensor, list[Tensor]]:
    logprobs, entropy = _leaf(0), _leaf(0)
    inputs = LossInputs(PolicyObjective(entropy_coef=0.1), _ints(0, 0), 7.0, advantages=torch.ones(1))
    return policy_loss(logprobs, entropy, inputs).loss, [logprobs, entropy]


def _of_rows(function: Callable[..., Tensor], *leaves: Tensor) -> tuple[Tensor, list[Tensor]]:
    return function(*leaves), list(leaves)


EMPTY: dict[str, Callable[[], tuple[Tensor, list[Tensor]]]] = {
    "linear_policy_loss": lambda: _of_empty_head(has_loss=True),
    "linear_logprob": lambda: _of_empty_head(has_loss=False),
    "policy_loss": _of_no_logprobs,
    "attention_varlen": lambda: _no_keys(_ints(0, 0)),
    "attention_varlen, no sequence": lambda: _no_keys(_ints(0)),
    "attention_varlen, keys alone": lambda: _no_keys(_ints(0, 0), num_keys=3),
    "grouped_linear": lambda: _of_rows(lambda x, w: grouped_linear(x, w, [0, 0]), _leaf(0, 16), _leaf(2, 8, 16)),
    "grouped_linear, no expert": lambda: _of_rows(lambda x, w: grouped_linear(x, w, []), _leaf(0, 16), _leaf(0, 8, 16)),
    "swiglu": lambda: _of_rows(swiglu, _leaf(0, SIZE), _leaf(0)),
    "rms_norm": lambda: _of_rows(lambda x, weight: rms_norm(x, weight, eps=1e-6), _leaf(0, SIZE), _leaf(SIZE)),
}
"""name -> (output, leaves) of a batch without tokens."""
EMPTY_TIERS = [(name, tier) for name in EMPTY for tier in that_run_here(name)]


def check_an_empty_batch_has_gradients_of_zero(name: str) -> None:
    out, leaves = EMPTY[name]()
    assert out.requires_grad
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
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
