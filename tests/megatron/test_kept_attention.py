"""recompute=full_but_attention gives the bits of full recomputation, but computes attention once and keeps no q, k and v."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import megatron_models as tiny
import pytest
import torch
from torch import Tensor

from marsrl.kernels import attention_varlen
from marsrl.trainer.learner.megatron import shim

LAYERS, BATCHES = 3, 2
CU_SEQLENS = {"even": torch.tensor([0, 8, 16, 24]), "uneven": torch.tensor([0, 3, 3, 17, 24])}


def stepped(folder: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> tuple[dict[str, Tensor], int]:
    """Take two steps; return gradient norms and weights, and how often attention was called."""
    shim.install()
    from marsrl.trainer.learner.megatron import attention

    calls = []

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args)
        return attention_varlen(*args, **options)

    monkeypatch.setattr(attention, "attention_varlen", counted)
    learner = tiny.learner(folder, **policy)
    norms = [tiny.step(learner, tiny.micro_batches(tiny.sequences(6), BATCHES)).grad_norm for _ in range(2)]
    return {"norms": torch.tensor(norms), **tiny.weights(learner)}, len(calls)


@pytest.mark.parametrize(
    ("kind", "dtype", "adapter"),
    [("qwen3_moe", "bfloat16", None), ("qwen2", "float32", None), ("qwen3", "float32", {"rank": 4})],
)
def test_kept_attention_gives_the_bits_of_full_recomputation(
    kind: str, dtype: str, adapter: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save_model(kind, tmp_path / "m", num_hidden_layers=LAYERS)
    options = {"dtype": dtype, "adapter": adapter}
    expected, twice = stepped(folder, monkeypatch, recompute="full", **options)
    found, once = stepped(folder, monkeypatch, recompute="full_but_attention", **options)
    assert (twice, once) == (4 * LAYERS * BATCHES, 2 * LAYERS * BATCHES)
    assert expected["norms"].all() and all(torch.equal(value, found[name]) for name, value in expected.items())


def test_scoring_keeps_no_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim.install()
    from marsrl.trainer.learner.megatron import attention

    monkeypatch.setattr(attention, "KeptAttention", None)
    learner = tiny.learner(tiny.save_model("qwen3", tmp_path / "m"), recompute="full_but_attention")
    assert learner.score(tiny.micro_batches(tiny.sequences(4), 1))


class Flash(torch.autograd.Function):
    """Saves what flash-attn saves for its backward pass: q, k, v, the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("ihd,jhd->hij", q, k)
        out, lse = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v), scores.logsumexp(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        p = (torch.einsum("ihd,jhd->hij", q, k) - lse[..., None]).exp()
        of_p = torch.einsum("ihd,jhd->hij", grad, v) - (grad * out).sum(-1).T[..., None]
        of_s = p * of_p
        return (
            torch.einsum("hij,jhd->ihd", of_s, k),
            torch.einsum("hij,ihd->jhd", of_s, q),
            torch.einsum("hij,ihd->jhd", p, grad),
        )


def fused_qkv(heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Return q with its own memory, and k and v as views of one tensor, as in the learner."""
    torch.manual_seed(0)
    kv = torch.randn(24, heads, 32)
    return torch.randn(24, 2, 16), kv[..., 16:], kv[..., :16]


def kept_attention(attend: Any) -> tuple[Any, list[Any]]:
    """Return a KeptAttention, and weak references to the storages of its q and k. Both tensors are gone on return."""
    from marsrl.trainer.learner.megatron.attention import KeptAttention

    q, k, v = fused_qkv()
    with torch.no_grad():
        kept = KeptAttention(attend, q, k, v)
    return kept, [weakref.ref(x.untyped_storage()) for x in (q, k)]


@pytest.mark.parametrize("name", ["flash", "cpu", "reference"])
@pytest.mark.parametrize("lengths", CU_SEQLENS)
def test_the_gradient_equals_that_of_one_forward_pass(name: str, lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shim.install()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Flash.apply(q, k, v) if name == "flash" else attention_varlen(q, k, v, CU_SEQLENS[lengths])

    if name != "flash":
        monkeypatch.setenv("MARSRL_KERNELS", name)
    kept, memory = kept_attention(attend)
    if name == "flash":  # others save copies, so this would prove nothing
        assert [each() for each in memory] == [None, None]
    found, expected = ([x.requires_grad_() for x in fused_qkv()] for _ in range(2))
    for output in kept.resume(*found), attend(*expected):
        (output**2).sum().backward()
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_kept_attention_is_freed_without_a_backward() -> None:
    shim.install()
    kept, _ = kept_attention(Flash.apply)
    output = weakref.ref(kept.output.untyped_storage())
    assert output() is not None
    del kept
    assert output() is None


def test_recomputed_values_in_another_layout_are_refused() -> None:
    shim.install()
    kept, _ = kept_attention(Flash.apply)
    q, k, v = fused_qkv()
    with pytest.raises(AssertionError, match="another memory layout"):
        kept.resume(q, k.contiguous(), v)
