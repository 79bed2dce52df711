"""attention_varlen: causal attention of packed sequences of very different lengths, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from case import Bench, Case, Compared, Missing, Shape, Variant, normal
from peers import flash_attn, why_not_imported
from torch import Tensor

from marsrl.kernels import attention_varlen


def _shapes(device: str, quick: bool) -> list[Shape]:
    if quick:
        return [Shape(device, tokens=128, sequences=4, heads=4, kv_heads=2, head_size=16)]
    if device == "cpu":
        return [Shape(device, tokens=2048, sequences=16, heads=4, kv_heads=2, head_size=64)]
    return [
        Shape(device, "bfloat16", tokens=tokens, sequences=16, heads=16, kv_heads=8, head_size=128)
        for tokens in (4096, 16384, 65536)
    ]


def lengths(shape: Shape) -> list[int]:
    """Long-tailed lengths, as in rollouts: sequence i is about twice as long as sequence i + 4; they sum to T."""
    weights = [2.0 ** (-i / 4) for i in range(shape.sequences)]
    found = [max(1, int(shape.tokens * weight / sum(weights))) for weight in weights]
    found[0] += shape.tokens - sum(found)
    return found


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    q, k, v = (
        randn(shape.tokens, heads, shape.head_size).to(dtype).requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    compared = Compared({"dq": q, "dk": k, "dv": v}, randn(*q.shape).to(dtype))
    sizes = lengths(shape)
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=shape.device)
    segments = partial(_segments, bounds=bounds)
    variants: list[Variant | Missing] = [
        compared.variant("ours", partial(attention_varlen, cu_seqlens=cu_seqlens)),
        compared.variant("torch eager", segments, "a loop over the sequences"),
    ]
    if shape.device == "cpu" or shape.tokens <= 16384:
        variants.append(compared.variant("torch SDPA, padded", partial(_padded, sizes=sizes), "pads to the longest"))
    for name, found in (("flash-attn varlen", _flash_attn()), ("torch varlen_attn", _torch_varlen(shape))):
        if isinstance(found, str):
            variants.append(Missing(name, found))
        else:
            variants.append(compared.variant(name, partial(found, cu_seqlens=cu_seqlens, longest=max(sizes))))
    # causal: n^2 / 2 pairs; q k^T and p v forward, five such products backward
    flops = 7 * sum(n * n for n in sizes) * shape.heads * shape.head_size
    num_bytes = 2.0 * (q.nbytes + k.nbytes + v.nbytes) + 2 * q.nbytes
    result_bytes = q.nbytes * 2 + k.nbytes + v.nbytes
    return Bench(variants, partial(compared.judge, segments), flops, num_bytes, result_bytes)


def _segments(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    parts = []
    for begin, end in pairwise(bounds):
        query, key, value = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _padded(q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Tensor:
    """[S, L, ...] as a trainer without packing stores its batch: the padding is part of its cost."""
    query, key, value = (
        torch.nn.utils.rnn.pad_sequence(list(each.split(sizes)), batch_first=True).transpose(1, 2) for each in (q, k, v)
    )
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    return torch.cat([row[:size] for row, size in zip(out, sizes)])


Attention = Callable[..., Tensor]
"""out [T, N, D] of q, k, v, cu_seqlens [S+1] and the longest sequence."""


def _flash_attn() -> Attention | str:
    """It, or why not."""
    function = flash_attn("flash_attn_varlen_func")
    if isinstance(function, str):
        return function

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        return function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)

    return call


def _torch_varlen(shape: Shape) -> Attention | str:
    """It, or why not. Its first releases take is_causal, the later ones a window, of which (-1, 0) is causal."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return why_not_imported(error)
    if shape.device != "cuda":
        return "it has no CPU kernel"
    known = inspect.signature(varlen_attn).parameters
    ways: list[dict[str, Any]] = [{"window_size": (-1, 0)}, {"is_causal": True}]
    causal = next((way for way in ways if way.keys() <= known.keys()), None)
    if causal is None:
        return (
            f"in torch {torch.__version__} it has neither window_size nor is_causal, so it cannot be told to be causal"
        )

    def call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        repeats = q.shape[1] // k.shape[1]  # not every version takes grouped queries
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (k, v))
        out = varlen_attn(q, keys, values, cu_seqlens, cu_seqlens, longest, longest, **causal)
        assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
        return out

    return call


CASE = Case("attention_varlen", _shapes, _build)
