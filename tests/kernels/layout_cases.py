"""Cases of all ops, and memory layouts for their tensors: transposed, strided, expanded, offset, far apart."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from fused_head import linear_policy_loss, policy_loss
from torch import Tensor
from torch.utils._pytree import tree_leaves

from marsrl.kernels import (
    PolicyObjective,
    RowOrder,
    Support,
    attention_decode,
    attention_varlen,
    group_advantage,
    grouped_linear,
    kept_rows,
    linear_logprob,
    moe_permute,
    moe_unpermute,
    mpt_gate,
    pack,
    rms_norm,
    swiglu,
)
from marsrl.kernels.sequence_sums import sequence_sums

Tensors = dict[str, Tensor]
TOKENS, SIZE, VOCAB = 9, 16, 40
BF16 = torch.bfloat16


def transposed(values: Tensor) -> Tensor:
    """Make the first dimension the innermost."""
    order = list(range(values.dim()))[::-1]
    return values.permute(order).contiguous().permute(order)


def strided(values: Tensor) -> Tensor:
    """Use every other element of memory. The gaps hold True, NaN or 2^30, which would spoil a result."""
    fill = True if values.dtype == torch.bool else torch.nan if values.is_floating_point() else 2**30
    wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), fill)
    wide[..., ::2] = values
    return wide[..., ::2]


def expanded(values: Tensor) -> Tensor:
    """Repeat the first row. Unlike the other layouts, this changes the values."""
    return values[:1].expand_as(values)


def offset(values: Tensor) -> Tensor:
    """Start one element after an aligned address, so that the tensor is only aligned to its element size."""
    memory = values.new_zeros(values.numel() + 1)
    memory[1:] = values.flatten()
    return memory[1:].view(values.shape)


def far_apart(values: Tensor, dim: int = 0) -> Tensor:
    """Place elements that are neighbours along `dim` so far apart that the last begins after 2^31 elements. The memory between
    them is untouched, so only pages with numbers exist.
    """
    if values.dim() <= dim or values.shape[dim] < 2:
        return values
    distance = 2**31 // (values.shape[dim] - 1) // 16 * 16 + 16
    others = [size for place, size in enumerate(values.shape) if place != dim]
    strides = [prod(others[place + 1 :]) for place in range(len(others))]
    strides.insert(dim, distance)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE of Linux
    memory = mmap.mmap(-1, values.shape[dim] * distance * values.element_size(), flags=flags)
    return torch.frombuffer(memory, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)


LAYOUTS = {each.__name__: each for each in (transposed, strided, expanded, offset)}


@dataclass(frozen=True)
class Taken:
    """An op and its arguments.

    run: function that calls the op on tensors by name. tensors: function that creates these tensors. leaves: names of the tensors
    that get a gradient.
    """

    run: Callable[[Tensors], list[Tensor]]
    tensors: Callable[[], Tensors]
    leaves: tuple[str, ...] = ()


def _ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _bools(*values: int) -> Tensor:
    return torch.tensor(values) > 0


BOUNDS = _ints(0, 4, 4, 9, dtype=torch.int32)
MASK = _bools(0, 1, 1, 1, 0, 1, 1, 0, 1)
OBJECTIVES = {
    "": PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, correction="tis", mpt_probability=0.3),
    ", sequences": PolicyObjective(ratio="sequence", correction="icepop", kl="k1", kl_coef=0.1),
    ", no bonus": PolicyObjective(kl="k2", kl_coef=0.1),
}


def _loss_tensors() -> Tensors:
    return {
        "cu_seqlens": BOUNDS,
        "normaliser": torch.full((1,), 7.0),
        "advantages": torch.randn(3),
        "mask": MASK,
        "agent_of": _ints(0, 1, 1),
        "gate": _bools(1, 0, 1),
        "old_logprobs": -torch.randn(TOKENS).abs(),
        "rollout_logprobs": -torch.randn(TOKENS).abs(),
        "reference_logprobs": -torch.randn(TOKENS).abs(),
        "weights": torch.randn(3),
        "dropped": _bools(0, 0, 1, 0, 0, 0, 0, 0, 0),
    }


def _of(function: Callable[..., Any], **words: Any) -> Callable[[Tensors], list[Tensor]]:
    """Return a function that calls the op on tensors by name; the three tensors of a support have names like `support.ids`.

    words: further arguments of the op. For compiled ops, these must not be numbers: a compiler would not treat them as constants.
    """

    def run(tensors: Tensors) -> list[Tensor]:
        given: dict[str, Any] = {name: values for name, values in tensors.items() if not name.startswith("support.")}
        if len(given) < len(tensors):
            given["support"] = Support(*(tensors[f"support.{name}"] for name in ("ids", "starts", "counts")), 4)
        found = function(**given, **words)
        leaves = tree_leaves(found if isinstance(found, (Tensor, tuple)) else vars(found))
        return [each for each in leaves if each is not None]

    return run


def _head(
    dtype: torch.dtype,
    objective: PolicyObjective | None = None,
    *,
    has_support: bool = True,
    has_main_grad: bool = False,
) -> Taken:
    """Return a call of linear_policy_loss or, without an objective, of linear_logprob."""

    def made() -> Tensors:
        tensors = {
            "hidden": torch.randn(TOKENS, SIZE, dtype=dtype),
            "weight": torch.randn(VOCAB, SIZE, dtype=dtype),
            "targets": _ints(*range(TOKENS)),
            "temperature": torch.rand(TOKENS) + 0.5,
        }
        if has_support:
            tensors["support.ids"] = _ints(0, 1, 2, 5, dtype=torch.int32)
            tensors["support.starts"] = _ints(*[0] * TOKENS)
            tensors["support.counts"] = _ints(2, *[0] * (TOKENS - 1))
        if has_main_grad:
            tensors["main_grad"] = torch.ones(VOCAB, SIZE)
        return tensors | _loss_tensors() if objective else tensors

    run = _of(linear_policy_loss, objective=objective, num_agents=2) if objective else _of(linear_logprob)
    return Taken(run, made, ("hidden", "weight"))


def _permute(tensors: Tensors) -> list[Tensor]:
    order = RowOrder.of_map(tensors["routing_map"], 2 * tensors["hidden"].shape[0])
    return list(moe_permute(tensors["hidden"], tensors["weights"], order))


def _unpermute(tensors: Tensors) -> list[Tensor]:
    rows = tensors["rows"]
    return [moe_unpermute(rows, RowOrder.of_map(tensors["routing_map"], rows.shape[0]))]


def _experts(dtype: torch.dtype) -> Tensors:
    x, weights = torch.randn(TOKENS, 16, dtype=dtype), torch.randn(2, 16, 16, dtype=dtype)
    return {"x": x, "weights": weights, "tokens_per_expert": _ints(4, 5)}


HEADS = {
    f"{name}, {str(dtype).removeprefix('torch.')}": _head(dtype, objective, **words)
    for dtype in (torch.float32, BF16)
    for name, objective, words in (
        ("linear_logprob without support", None, {"has_support": False}),
        ("linear_logprob", None, {}),
        ("linear_policy_loss", OBJECTIVES[""], {}),
        ("linear_policy_loss, sequences", OBJECTIVES[", sequences"], {}),
        ("linear_policy_loss with main_grad", OBJECTIVES[""], {"has_main_grad": True}),
    )
}
# The tests of layouts leave these calls out: calls in HEADS and OTHERS read almost all of their tensors too.
MORE = {
    f"linear_policy_loss without support{which}, bfloat16": _head(BF16, objective, has_support=False)
    for which, objective in OBJECTIVES.items()
} | {
    "linear_logprob with padding, bfloat16": Taken(
        lambda tensors: list(vars(linear_logprob(*tensors.values(), temperature=1.5, real_vocab_size=39)).values()),
        lambda: dict(list(HEADS["linear_logprob, bfloat16"].tensors().items())[:3]),
        ("hidden", "weight"),
    ),
    "attention_varlen of keys, both ways": Taken(
        lambda tensors: [attention_varlen(**tensors, max_seqlen=TOKENS, scale=-0.7, causal=False)],
        lambda: {**OTHERS["attention_varlen"].tensors(), "cu_seqlens_k": BOUNDS},
        ("q", "k", "v"),
    ),
    "rms_norm, bfloat16": Taken(
        lambda tensors: [rms_norm(**tensors, eps=1e-6, is_zero_centred=True)],
        lambda: {"x": torch.randn(TOKENS, SIZE, dtype=BF16), "weight": torch.randn(SIZE)},
        ("x", "weight"),
    ),
    "swiglu without weights": Taken(_of(swiglu), lambda: {"products": torch.randn(TOKENS, SIZE)}, ("products",)),
}
OTHERS = {
    "policy_loss": Taken(
        _of(policy_loss, objective=OBJECTIVES[""], num_agents=2),
        lambda: {"logprobs": -torch.randn(TOKENS).abs(), "entropy": torch.rand(TOKENS), **_loss_tensors()},
        ("logprobs", "entropy"),
    ),
    "mpt_gate": Taken(
        _of(mpt_gate),
        lambda: {"entropy": torch.rand(TOKENS) / 3, "mask": MASK, "cu_seqlens": BOUNDS, "positive": _bools(1, 0, 1)},
    ),
    "sequence_sums": Taken(
        _of(sequence_sums), lambda: {"values": torch.randn(TOKENS), "mask": MASK, "cu_seqlens": BOUNDS}
    ),
    "group_advantage": Taken(
        _of(group_advantage, normalise="agent_mean"),
        lambda: {
            "rewards": torch.randn(4),
            "group_of": _ints(0, 0, 1, 1),
            "agent_of": _ints(0, 1, 0, 1),
            "instance_of": _ints(0, 0, 1, 1),
        },
    ),
    "pack": Taken(
        _of(pack, num_tokens=TOKENS),
        lambda: {
            "token_ids": _ints(*range(TOKENS)),
            "is_sampled": MASK,
            "cu_seqlens": BOUNDS,
            "logprobs": torch.randn(TOKENS),
            "weights": torch.randn(TOKENS),
        },
    ),
    "kept_rows": Taken(_of(kept_rows), lambda: {"mask": MASK}),
    "attention_varlen": Taken(
        _of(attention_varlen),
        lambda: {
            **{name: torch.randn(TOKENS, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
            "cu_seqlens": BOUNDS,
        },
        ("q", "k", "v"),
    ),
    "attention_decode": Taken(
        _of(attention_decode),
        lambda: {
            "q": torch.randn(2, 4, 16),
            "k_cache": torch.randn(2, 8, 2, 16),
            "v_cache": torch.randn(2, 8, 2, 16),
            "lengths": _ints(3, 8),
        },
    ),
    "grouped_linear": Taken(_of(grouped_linear), partial(_experts, torch.float32), ("x", "weights")),
    "grouped_linear with main_grad, bfloat16": Taken(
        _of(grouped_linear), lambda: {**_experts(BF16), "main_grad": torch.ones(2, 16, 16)}, ("x", "weights")
    ),
    "moe_permute": Taken(
        _permute,
        lambda: {
            "hidden": torch.randn(TOKENS, SIZE),
            "weights": torch.rand(TOKENS, 4),
            "routing_map": _bools(1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1).view(3, 4).repeat(TOKENS // 3, 1),
        },
        ("hidden", "weights"),
    ),
    "moe_unpermute": Taken(  # tokens with 1, 2 and 0 rows
        _unpermute,
        lambda: {
            "rows": torch.randn(TOKENS, SIZE),
            "routing_map": _bools(1, 0, 1, 1, 0, 0).view(3, 2).repeat(TOKENS // 3, 1),
        },
        ("rows",),
    ),
    "rms_norm": Taken(
        lambda tensors: [rms_norm(**tensors, eps=1e-6)],
        lambda: {"x": torch.randn(TOKENS, SIZE), "weight": torch.randn(SIZE)},
        ("x", "weight"),
    ),
    "rms_norm of heads that are rotated": Taken(
        lambda tensors: [rms_norm(**tensors, eps=1e-6)],
        lambda: {"x": torch.randn(TOKENS, 3, SIZE), "weight": torch.randn(SIZE), "rotation": torch.randn(TOKENS, SIZE)},
        ("x", "weight"),
    ),
    "swiglu": Taken(
        _of(swiglu),
        lambda: {"products": torch.randn(TOKENS, SIZE), "weights": torch.randn(TOKENS)},
        ("products", "weights"),
    ),
}
OPS = {**HEADS, **OTHERS}
UPSTREAM = "the incoming gradient"


def results(op: Taken, tensors: Tensors, upstream: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """Return outputs, gradients, and main_grad. upstream: function that lays out the gradients of the outputs."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in op.leaves}
    outputs = op.run({**tensors, **leaves})
    if leaves:
        ends = [each for each in outputs if each.requires_grad]
        generator = torch.Generator("cpu").manual_seed(3)
        made = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        gradients = [torch.randn(each.shape, **made).to(each.dtype) for each in ends]
        torch.autograd.backward(ends, [upstream(each) if upstream and each.dim() else each for each in gradients])
    found = [each.detach() for each in outputs] + [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    return found + [tensors[name] for name in ("main_grad",) if name in tensors]


def tensors_of(op: Taken) -> Tensors:
    """Create the op's tensors, with the same values at each call."""
    torch.manual_seed(0)
    return op.tensors()


def _outcome(
    op: Taken, which: str = "", layout: Callable[[Tensor], Tensor] = lambda values: values
) -> list[Tensor] | Exception:
    """Return the results, or the error, if the tensor `which` or the incoming gradients have this layout."""
    tensors = tensors_of(op)
    if which in tensors:
        tensors[which] = layout(tensors[which])
    try:
        return results(op, tensors, layout if which == UPSTREAM else None)
    except (ValueError, RuntimeError) as error:
        return error


def check_every_layout(name: str, layouts: dict[str, Callable[[Tensor], Tensor]] = LAYOUTS) -> None:
    """Check that every tensor in every layout gives a contiguous copy's result, or an error that names it."""
    op, wrong = OPS[name], []
    plain, tensors = _outcome(op), tensors_of(op)
    assert not isinstance(plain, Exception), plain
    for which in [*tensors, *([UPSTREAM] if op.leaves else [])]:
        for how, layout in layouts.items():
            if layout is transposed and which != UPSTREAM and tensors[which].dim() < 2:
                continue  # this layout changes nothing
            has_other_values = which == UPSTREAM or layout is expanded
            copied = lambda values, layout=layout: layout(values).clone(memory_format=torch.contiguous_format)  # noqa: E731
            expected = _outcome(op, which, copied) if has_other_values else plain
            complaint = _difference(_outcome(op, which, layout), expected, which)
            if complaint is not None:
                wrong.append(f"{which} {how}: {complaint}")
    assert not wrong, "\n".join(wrong)


def _difference(actual: list[Tensor] | Exception, expected: list[Tensor] | Exception, name: str) -> str | None:
    """Return None if the results are equal, or if the tensor is refused by name."""
    if isinstance(expected, Exception):  # the values are refused, like boundaries that are all 0
        return (
            None if repr(actual) == repr(expected) else f"{actual!r}; expected {expected!r}, as for contiguous tensors"
        )
    if isinstance(actual, Exception):
        return None if isinstance(actual, ValueError) and name in str(actual) else repr(actual)
    for one, other in zip(actual, expected, strict=True):
        rtol = 2e-2 if one.dtype == BF16 else 1e-5
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * max(1.0, _size(other)), equal_nan=True)
        except AssertionError as error:
            return str(error)
    return None


def _size(values: Tensor) -> float:
    return values.abs().max().item() if values.is_floating_point() and values.numel() else 0.0
