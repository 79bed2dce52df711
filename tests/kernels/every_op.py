"""A small call of every op, forward and backward, on tensors that name their device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from marsrl.kernels import (
    LossInputs,
    PolicyObjective,
    Support,
    attention_decode,
    attention_varlen,
    explain,
    group_advantage,
    grouped_linear,
    kept_rows,
    linear_logprob,
    linear_policy_loss,
    mpt_gate,
    pack,
    policy_loss,
    rms_norm,
    swiglu,
)

NUM_TOKENS, SIZE, VOCAB = 9, 16, 40


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device="cpu").to(dtype)


def _leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return _numbers(*shape, dtype=dtype).requires_grad_()


def _ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def _bools(*values: int) -> Tensor:
    return torch.tensor(values, device="cpu") > 0


BOUNDS = _ints(0, 4, 4, 9, dtype=torch.int32)
MASK = _bools(0, 1, 1, 1, 0, 1, 1, 0, 1)
TARGETS = _ints(*range(NUM_TOKENS))
FULL = PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, correction="sequence_mask", mpt_probability=0.3)
SEQUENCE = PolicyObjective(ratio="sequence", correction="icepop")
NO_BONUS = PolicyObjective(kl="k2", kl_coef=0.1)


def _inputs(objective: PolicyObjective) -> LossInputs:
    return LossInputs(
        objective,
        BOUNDS,
        7.0,
        advantages=_numbers(3),
        mask=MASK,
        agent_of=_ints(0, 1, 1),
        num_agents=2,
        gate=_bools(1, 0, 1),
        old_logprobs=-_numbers(NUM_TOKENS).abs(),
        rollout_logprobs=-_numbers(NUM_TOKENS).abs(),
        reference_logprobs=-_numbers(NUM_TOKENS).abs(),
        weights=_numbers(3),
        dropped=_bools(0, 0, 1, 0, 0, 0, 0, 0, 0),
    )


def _of_head(
    objective: PolicyObjective | None,
    dtype: torch.dtype = torch.float32,
    *,
    compacts: bool = True,
    support: Support | None = None,
) -> list[Tensor]:
    """Loss (None: log-probs and entropy) and gradients."""
    hidden, weight = _leaf(NUM_TOKENS, SIZE, dtype=dtype), _leaf(VOCAB, SIZE, dtype=dtype)
    if objective is None:
        found = linear_logprob(hidden, weight, TARGETS, temperature=1.5, support=support, compacts=compacts)
        loss = found.logprobs.sum() + found.entropy.sum()
    else:
        inputs = _inputs(objective)
        loss = linear_policy_loss(hidden, weight, TARGETS, inputs, compacts=compacts, support=support).loss
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def _of_logprobs() -> list[Tensor]:
    logprobs, entropy = _leaf(NUM_TOKENS), _leaf(NUM_TOKENS)
    found = policy_loss(logprobs, entropy, _inputs(FULL))
    found.loss.backward()
    assert logprobs.grad is not None and entropy.grad is not None
    return [found.loss.detach(), *found.agent_sums.values(), logprobs.grad, entropy.grad]


def _of_attention() -> list[Tensor]:
    q, k, v = _leaf(NUM_TOKENS, 4, 16), _leaf(NUM_TOKENS, 2, 16), _leaf(NUM_TOKENS, 2, 16)
    out = attention_varlen(q, k, v, BOUNDS)
    out.sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def _of_experts() -> list[Tensor]:
    x, weights = _leaf(6, 16), _leaf(2, 16, 16)
    out = grouped_linear(x, weights, _ints(2, 4))
    out.sum().backward()
    assert x.grad is not None and weights.grad is not None
    return [out.detach(), x.grad, weights.grad]


def _of_activation() -> list[Tensor]:
    products, weights = _leaf(NUM_TOKENS, SIZE), _leaf(NUM_TOKENS)
    out = swiglu(products, weights)
    out.sum().backward()
    assert products.grad is not None and weights.grad is not None
    return [out.detach(), products.grad, weights.grad]


def _of_norm() -> list[Tensor]:
    x, weight = _leaf(NUM_TOKENS, SIZE), _leaf(SIZE)
    out = rms_norm(x, weight, eps=1e-6)
    out.sum().backward()
    assert x.grad is not None and weight.grad is not None
    return [out.detach(), x.grad, weight.grad]


def _of_packing() -> list[Tensor]:
    packed = pack(TARGETS, MASK, BOUNDS, NUM_TOKENS, logprobs=_numbers(NUM_TOKENS))
    return [each for each in vars(packed).values() if each is not None] + [kept_rows(packed.mask)]


def _of_decoding() -> list[Tensor]:
    return [attention_decode(_numbers(2, 4, 16), _numbers(2, 8, 2, 16), _numbers(2, 8, 2, 16), _ints(3, 8))]


SUPPORT = Support(_ints(0, 1, 2, 5, dtype=torch.int32), _ints(*[0] * NUM_TOKENS), _ints(2, *[0] * 8), 2)
HEADS: dict[str, Callable[[], list[Tensor]]] = {
    "linear_policy_loss": lambda: _of_head(FULL),
    "linear_policy_loss, sequences": lambda: _of_head(SEQUENCE),
    "linear_policy_loss, all rows": lambda: _of_head(FULL, compacts=False),
    "linear_policy_loss, support": lambda: _of_head(SEQUENCE, support=SUPPORT),
    "linear_policy_loss, bfloat16": lambda: _of_head(FULL, torch.bfloat16),
    "linear_policy_loss, sequences, bfloat16": lambda: _of_head(SEQUENCE, torch.bfloat16),
    "linear_policy_loss, bfloat16, no bonus": lambda: _of_head(NO_BONUS, torch.bfloat16),
    "linear_logprob": lambda: _of_head(None),
    "linear_logprob, bfloat16": lambda: _of_head(None, torch.bfloat16),
}
CALLS: dict[str, Callable[[], list[Tensor]]] = {
    **HEADS,
    "policy_loss": _of_logprobs,
    "mpt_gate": lambda: [mpt_gate(_numbers(NUM_TOKENS), MASK, BOUNDS, _bools(1, 0, 1))],
    "group_advantage": lambda: [
        group_advantage(_numbers(4), _ints(0, 0, 1, 1), _ints(0, 1, 0, 1), _ints(0, 0, 1, 1), normalise="agent_mean")
    ],
    "pack": _of_packing,
    "attention_varlen": _of_attention,
    "attention_decode": _of_decoding,
    "grouped_linear": _of_experts,
    "swiglu": _of_activation,
    "rms_norm": _of_norm,
}


def force(monkeypatch: pytest.MonkeyPatch, name: str, tier: str) -> None:
    """The op of this call is served by that implementation."""
    monkeypatch.setenv("MARSRL_KERNELS", ",".join(f"{op}={tier}" for op in _ops(name)))


def _ops(name: str) -> tuple[str, ...]:
    """What Op calls the op of a call of that name."""
    op = name.split(",")[0]
    return {"pack": ("pack", "kept_rows"), "mpt_gate": ("sequence_sums",)}.get(op, (op,))


def that_run_here(name: str) -> list[str]:
    """Implementations that this machine does not lack, unless they are Triton's: the interpreter's tests take these."""
    found = next(each for each in explain() if each.op == _ops(name)[0])
    preferred = [tier for tier, reason in found.reasons.items() if reason.endswith(" is preferred")]
    return [tier for tier in (found.chosen, *preferred) if tier is not None and not tier.startswith("triton")]


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
        inputs = LossInputs(PolicyObjective(), _ints(0, 0), 7.0, advantages=_numbers(1))
        return linear_policy_loss(hidden, weight, _ints(), inputs).loss, [hidden, weight]
    found = linear_logprob(hidden, weight, _ints())
    return found.logprobs.sum() + found.entropy.sum(), [hidden, weight]


def _of_no_logprobs() -> tuple[Tensor, list[Tensor]]:
    logprobs, entropy = _leaf(0), _leaf(0)
    inputs = LossInputs(PolicyObjective(entropy_coef=0.1), _ints(0, 0), 7.0, advantages=_numbers(1))
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
