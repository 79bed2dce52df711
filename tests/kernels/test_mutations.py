"""What the tests of each op refuse: every result that they judge, spoiled in a way that kernels go wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases
import decode_cases
import fused_head
import grouped_linear_cases
import packing_cases
import pytest
import rms_norm_cases
import swiglu_cases
import torch
from every_op import CALLS
from spoils import OF_FLAGS, SPOILS, TILE, Call, refuse_every_spoil, spoiled, two_rows_swapped, without_last_tile
from torch import Tensor

from marsrl.kernels import (
    attention_decode,
    attention_varlen,
    group_advantage,
    grouped_linear,
    mpt_gate,
    pack,
    rms_norm,
    swiglu,
)
from marsrl.kernels.head import gemms
from marsrl.kernels.head.rows import cpu
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.sequence_sums import sequence_sums
from marsrl.kernels.testing import assert_accurate

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def head_case(vocab: int = 256) -> fused_head.Head:
    """Logits of about 1, no token sure of its target: bfloat16 in plain PyTorch is then as exact as it gets."""
    return torch.randn(128, 32), torch.randn(vocab, 32) * 0.1, torch.randint(0, vocab - TILE, (128,))


def compare_policy_loss(dtype: torch.dtype) -> None:
    case = head_case()
    fused_head.compare_policy_loss(case, fused_head.arguments_for(case, "k3, entropy bonus, tis"), dtype)


def compare_logprob(dtype: torch.dtype) -> None:
    fused_head.compare_logprob(head_case(), dtype=dtype)


def compare_given_logprobs(_: torch.dtype) -> None:
    fused_head.compare_policy_loss_of_logprobs("k3, entropy bonus, tis", 200)


def compare_attention(dtype: torch.dtype, attention: Any = attention_varlen) -> None:
    attention_cases.compare([40, 30], dtype=dtype, head_size=32, attention=attention, repeats=False)


def compare_decode(dtype: torch.dtype) -> None:
    decode_cases.compare([40, 70, 33] * 8, 80, (32, 2), 32, dtype=dtype)


def compare_grouped(dtype: torch.dtype, function: Any = grouped_linear) -> None:
    grouped_linear_cases.compare([40, 0, 70], 48, 64, dtype, given=[40, 0, 70], function=function)


def compare_swiglu(dtype: torch.dtype, function: Any = swiglu) -> None:
    swiglu_cases.compare((100,), 64, dtype, function=function)


def compare_rms_norm(dtype: torch.dtype, function: Any = rms_norm) -> None:
    rms_norm_cases.compare((100,), 64, dtype, function=function)


OPS = {
    "linear_policy_loss": (fused_head, compare_policy_loss),
    "linear_logprob": (fused_head, compare_logprob),
    "policy_loss": (fused_head, compare_given_logprobs),
    "attention_varlen": (attention_cases, compare_attention),
    "attention_decode": (decode_cases, compare_decode),
    "grouped_linear": (grouped_linear_cases, compare_grouped),
    "swiglu": (swiglu_cases, compare_swiglu),
    "rms_norm": (rms_norm_cases, compare_rms_norm),
}


def test_every_op_is_spoiled_here():
    names = {name.split(",")[0] for name in CALLS}
    assert names == set(OPS) | {"pack", "mpt_gate", "group_advantage"}  # those three: below


@pytest.mark.parametrize("op, dtype", [*((op, FP32) for op in OPS), *((op, BF16) for op in OPS if op != "policy_loss")])
def test_every_spoiled_result_is_refused(op, dtype, monkeypatch):
    refuse_every_spoil(*OPS[op], dtype, monkeypatch)


def test_a_weight_gradient_of_nothing_but_its_targets_is_refused(monkeypatch):
    """The error of the columns that are nobody's target drowns in that of the targets, and is seen beside its like."""
    calls: list[Call] = []
    monkeypatch.setattr(fused_head, "assert_accurate", lambda *values, **words: calls.append((values, words)))
    case = head_case(vocab=4000)
    fused_head.compare_policy_loss(case, fused_head.arguments_for(case, "clip"), BF16)
    (name, found, exact, plain), words = calls[-1]
    zeroed = found.masked_fill(words["apart"][:, None], 0)
    error, baseline = ((values.double() - exact).abs().max() for values in (zeroed, plain))
    assert name == "weight.grad" and error <= max(2 * baseline, 4 * torch.finfo(BF16).eps * exact.abs().max())
    with pytest.raises(AssertionError, match=r"weight.grad: \d+ of \d+ blocks apart are off"):
        assert_accurate(name, zeroed, exact, plain, **words)


def skip_in_row_kernels(patch: pytest.MonkeyPatch) -> None:
    c_rows = cpu.c_rows
    patch.setattr(cpu, "c_rows", lambda logits, width, rows, head: c_rows(logits, width, rows, without_last_tile(head)))
    tile = Head.tile
    patch.setattr(Head, "tile", lambda head, columns: without_last_tile(tile(head, columns)))


def skip_in_hidden_gradient(patch: pytest.MonkeyPatch) -> None:
    product, pieces = gemms.HeadGemms.hidden_gradient, gemms.HeadGemms.hidden_and_weight_gradient

    def zero_tile(dz: Tensor) -> Tensor:
        return dz.clone().index_fill_(1, torch.arange(TILE, 2 * TILE), 0)

    patch.setattr(gemms.HeadGemms, "hidden_gradient", lambda self, dz: product(self, zero_tile(dz)))
    patch.setattr(
        gemms.HeadGemms,
        "hidden_and_weight_gradient",
        lambda self, dz_of, *rest: pieces(self, lambda tile: zero_tile(dz_of(tile)), *rest),
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("compare", [compare_policy_loss, compare_logprob])
@pytest.mark.parametrize("skip", [skip_in_row_kernels, skip_in_hidden_gradient])
def test_a_vocabulary_tile_that_a_head_skips_is_seen(compare, skip, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "cpu")
    monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 64)
    skip(monkeypatch)
    fused_head_forced = fused_head.forced
    monkeypatch.setattr(fused_head, "forced", lambda name: fused_head_forced(name or "cpu"))
    with pytest.raises(AssertionError, match="error|blocks"):
        compare(dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_tile_of_keys_or_of_a_sum_that_is_skipped_is_seen(dtype, monkeypatch):
    def skip_keys(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **words: Any) -> Tensor:
        return attention_varlen(q, k, v.index_fill(0, torch.arange(TILE, 2 * TILE), 0), *rest, **words)

    def skip_depth(x: Tensor, weights: Tensor, counts: Any) -> Tensor:
        return grouped_linear(x.index_fill(1, torch.arange(TILE, 2 * TILE), 0), weights, counts)

    def skip_cached(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **words: Any) -> Tensor:
        return attention_decode(q, k, v.index_fill(1, torch.arange(TILE, 2 * TILE), 0), *rest, **words)

    monkeypatch.setattr(decode_cases, "attention_decode", skip_cached)
    for compare in (partial(compare_attention, attention=skip_keys), partial(compare_grouped, function=skip_depth)):
        with pytest.raises(AssertionError, match="output: "):
            compare(dtype)
    with pytest.raises(AssertionError, match="output: "):
        compare_decode(dtype)


@contextmanager
def spoiled_packing(spoil: Callable[[Tensor], None], field: str) -> Iterator[None]:
    def spoiled_pack(*values: Any, **words: Any) -> Any:
        found = pack(*values, **words)
        return replace(found, **{field: spoiled(getattr(found, field), spoil)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing_cases, "pack", spoiled_pack)
        yield


FIELDS = ("token_ids", "position_ids", "targets", "logprobs", "weights")


@pytest.mark.parametrize(
    "field, spoil", [(field, spoil) for field in FIELDS for spoil in SPOILS[:3]] + [("mask", each) for each in OF_FLAGS]
)
def test_packing_that_is_spoiled_is_seen(field, spoil):
    layout = ([[True, False, True, True] * 20, [False, True] * 40], 0)
    packing_cases.check_layout(layout)
    with spoiled_packing(spoil, field), pytest.raises(AssertionError):
        packing_cases.check_layout(layout)


def test_sums_advantages_and_gates_that_are_spoiled_are_seen(monkeypatch):
    lengths = torch.randint(1, 40, (64,))
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    tokens = int(cu_seqlens[-1])
    values, mask, positive = torch.rand(tokens), torch.rand(tokens) < 0.9, torch.ones(64, dtype=torch.bool)
    rewards, ids = torch.rand(64, dtype=FP64), torch.arange(64) // 8

    def results() -> dict[str, Tensor]:
        sums = sequence_sums(values, mask, cu_seqlens)
        gate = mpt_gate(values, mask, cu_seqlens, positive, entropy_threshold=0.5)
        return {"sums": sums[0], "counts": sums[1], "advantage": group_advantage(rewards, ids, ids, ids), "gate": gate}

    found = results()
    monkeypatch.setenv("MARSRL_KERNELS", "reference")
    for name, exact in results().items():
        exact = exact.double()
        assert_accurate(name, found[name].double(), exact, exact)
        for spoil in OF_FLAGS if name == "gate" else SPOILS:
            if name == "counts" and spoil is two_rows_swapped:
                continue  # those two may be equal
            with pytest.raises(AssertionError, match=name):
                assert_accurate(name, spoiled(found[name].double(), spoil), exact, exact)
                pytest.fail(f"{name} passes as {spoil.__name__}")
