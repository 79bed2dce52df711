"""The tests of each op refuse every result that they judge, spoiled in a way that kernels go wrong."""

from collections.abc import Callable
from typing import Any

import attention_cases
import decode_cases
import fused_head
import grouped_linear_cases
import pytest
import rms_norm_cases
import swiglu_cases
import torch
from torch import Tensor

from marsrl.kernels.testing import assert_accurate

BF16, FP32 = torch.bfloat16, torch.float32
TILE = 16


def block_of_zeros(values: Tensor) -> None:
    values[TILE : 2 * TILE, :TILE] = 0


def last_tile_dropped(values: Tensor) -> None:
    values[-TILE:] = 0


def two_rows_swapped(values: Tensor) -> None:
    size = values.double().sum(dim=1)
    pair = torch.stack((size.argmin(), size.argmax()))
    values[pair] = values[pair.flip(0)]


def scaled_by_a_hundredth(values: Tensor) -> None:
    values.copy_(values * 1.01)


SPOILS = (block_of_zeros, last_tile_dropped, two_rows_swapped, scaled_by_a_hundredth)


def spoiled(values: Tensor, spoil: Callable[[Tensor], None]) -> Tensor:
    """A copy, spoiled as a matrix: rows are all dimensions but the last, and of a vector its entries."""
    copy = values.detach().clone(memory_format=torch.contiguous_format)
    spoil(copy.view(-1, 1) if copy.dim() < 2 else copy.flatten(0, -2))
    return copy


def of_head(compare: Callable[..., Any], dtype: torch.dtype, name: str = "", vocab: int = 256) -> None:
    """Logits of about 1, no token sure of its target: bfloat16 in plain PyTorch is then as exact as it gets."""
    case = torch.randn(128, 32), torch.randn(vocab, 32) * 0.1, torch.randint(0, vocab - TILE, (128,))
    compare(case, *([fused_head.arguments_for(case, name)] if name else []), dtype=dtype)


OPS: dict[str, tuple[Any, Callable[[torch.dtype], Any]]] = {
    "linear_policy_loss": (
        fused_head,
        lambda dtype: of_head(fused_head.compare_policy_loss, dtype, "k3, entropy bonus, tis"),
    ),
    "linear_logprob": (fused_head, lambda dtype: of_head(fused_head.compare_logprob, dtype)),
    "policy_loss": (
        fused_head,
        lambda _: fused_head.compare_policy_loss_of_logprobs("k3, entropy bonus, tis", 200),
    ),
    "attention_varlen": (
        attention_cases,
        lambda dtype: attention_cases.compare([40, 30], dtype=dtype, head_size=32, repeats=False),
    ),
    "attention_decode": (
        decode_cases,
        lambda dtype: decode_cases.compare([40, 70, 33] * 8, 80, (32, 2), 32, dtype=dtype),
    ),
    "grouped_linear": (
        grouped_linear_cases,
        lambda dtype: grouped_linear_cases.compare([40, 0, 70], 48, 64, dtype, given=[40, 0, 70]),
    ),
    "swiglu": (swiglu_cases, lambda dtype: swiglu_cases.compare((100,), 64, dtype)),
    "rms_norm": (rms_norm_cases, lambda dtype: rms_norm_cases.compare((100,), 64, dtype)),
}
Call = tuple[tuple[Any, ...], dict[str, Any]]


def judged(op: str, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> list[Call]:
    """What the comparison of the op hands to the judge."""
    module, compare = OPS[op]
    calls: list[Call] = []
    patch.setattr(module, "assert_accurate", lambda *values, **words: calls.append((values, words)))
    compare(dtype)
    return calls


@pytest.mark.parametrize("op, dtype", [*((op, FP32) for op in OPS), *((op, BF16) for op in OPS if op != "policy_loss")])
def test_every_spoiled_result_is_refused(op, dtype, monkeypatch):
    calls = judged(op, dtype, monkeypatch)
    large = [call for call in calls if call[0][1].dim() and call[0][1].numel() >= 4 * TILE]
    assert large
    for (name, found, *rest), words in large:
        assert_accurate(name, found, *rest, **words)
        for spoil in SPOILS:
            with pytest.raises(AssertionError, match=name):
                assert_accurate(name, spoiled(found, spoil), *rest, **words)
                pytest.fail(f"{name} passes as {spoil.__name__}")


def test_a_weight_gradient_of_nothing_but_its_targets_is_refused(monkeypatch):
    """The error of the columns that are nobody's target drowns in that of the targets, and is seen beside its like."""
    calls: list[Call] = []
    monkeypatch.setattr(fused_head, "assert_accurate", lambda *values, **words: calls.append((values, words)))
    of_head(fused_head.compare_policy_loss, BF16, "clip", vocab=4000)
    (name, found, exact, plain), words = calls[-1]
    zeroed = found.masked_fill(words["apart"][:, None], 0)
    error, baseline = ((values.double() - exact).abs().max() for values in (zeroed, plain))
    assert name == "weight.grad" and error <= max(2 * baseline, 4 * torch.finfo(BF16).eps * exact.abs().max())
    with pytest.raises(AssertionError, match=r"weight.grad: \d+ of \d+ blocks apart are off"):
        assert_accurate(name, zeroed, exact, plain, **words)
