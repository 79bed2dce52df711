"""attention_varlen: causal attention of packed sequences of very different lengths, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from case import Bench, Case, Compared, Missing, Shape, Variant, normal
from torch import Tensor

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen import flash
from marsrl.kernels.triton_machine import machine_lacks_cuda


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
    """Return long-tailed lengths that sum to T, as in rollouts: sequence i is about twice as long as sequence i + 4."""
    weights = [2.0 ** (-i / 4) for i in range(shape.sequences)]
    sizes = [max(1, int(shape.tokens * weight / sum(weights))) for weight in weights]
    sizes[0] += shape.tokens - sum(sizes)
    return sizes


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
    options = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens, "scale": shape.head_size**-0.5, "causal": True}
    options["max_seqlen"] = max(sizes)
    for name, why_not, run in _others(q):
        variants.append(compared.variant(name, partial(run, **options)) if why_not is None else Missing(name, why_not))
    # A causal mask leaves n^2 / 2 pairs of query and key. The forward has two products over them (q k^T and p v), the backward
    # five.
    flops = 7 * sum(n * n for n in sizes) * shape.heads * shape.head_size
    num_bytes = 2.0 * (q.nbytes + k.nbytes + v.nbytes) + 2 * q.nbytes
    result_bytes = q.nbytes * 2 + k.nbytes + v.nbytes
    return Bench(variants, partial(compared.judge, segments), flops, num_bytes, result_bytes)


def _segments(q: Tensor, k: Tensor, v: Tensor, bounds: list[int]) -> Tensor:
    parts = []
    for begin, end in pairwise(bounds):
        query, key, value = (tensor[begin:end].transpose(0, 1)[None] for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _padded(q: Tensor, k: Tensor, v: Tensor, sizes: list[int]) -> Tensor:
    """Attend on a padded batch [S, L, ...], as in a trainer without packing, so that padding costs time."""
    query, key, value = (
        torch.nn.utils.rnn.pad_sequence(list(tensor.split(sizes)), batch_first=True).transpose(1, 2)
        for tensor in (q, k, v)
    )
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    return torch.cat([row[:size] for row, size in zip(out, sizes)])


def _others(q: Tensor) -> Iterator[tuple[str, str | None, Callable[..., Tensor]]]:
    """Yield (name, reason why it cannot run or None, function) for each kernel of other projects that our op can dispatch to."""
    for version in (flash.FLASH_4, flash.FLASH_3, flash.FLASH_2):
        reason = flash.machine_lacks(version) or flash.why_not(version, q)
        yield f"flash-attn {version.name[-1]}", reason, partial(flash.attention_varlen_flash, version)
    reason = machine_lacks_cuda() or flash.why_not_varlen_attn(q, False)
    yield "torch varlen_attn", reason, flash.attention_varlen_torch


CASE = Case("attention_varlen", _shapes, _build)
