"""attention_decode: one new token per sequence over its key-value cache, sequences of very different lengths."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from case import Bench, Case, Compared, Missing, Shape, Variant, normal
from peers import flash_attn
from torch import Tensor

from marsrl.kernels import attention_decode
from marsrl.kernels.attention_decode.reference import attention_decode_reference


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return the shapes; `tokens` is the number of positions in all caches together, S x L."""
    if quick:
        return [Shape(device, tokens=4 * 32, sequences=4, heads=4, kv_heads=2, head_size=16, note="caches of 32")]
    if device == "cpu":
        return [
            Shape(
                device, dtype, tokens=32 * 1024, sequences=32, heads=8, kv_heads=4, head_size=64, note="caches of 1,024"
            )
            for dtype in ("float32", "bfloat16")
        ]
    return [
        Shape(
            device, "bfloat16", tokens=sequences * 4096, sequences=sequences, heads=16, kv_heads=8, head_size=128,
            note="caches of 4,096",
        )
        for sequences in (16, 256)
    ]  # fmt: skip


def _build(shape: Shape) -> Bench:
    randn, dtype, capacity = normal(shape), getattr(torch, shape.dtype), shape.tokens // shape.sequences
    q = randn(shape.sequences, shape.heads, shape.head_size).to(dtype)
    of_cache = shape.sequences, shape.kv_heads, capacity, shape.head_size  # head-major, as in the local engine
    k, v = (randn(*of_cache).to(dtype).transpose(1, 2) for _ in range(2))
    lengths = torch.linspace(1, capacity, shape.sequences, device=shape.device).long()
    scale = shape.head_size**-0.5
    compared = Compared({"q": q, "k": k, "v": v})
    eager = partial(attention_decode_reference, lengths=lengths, scale=scale)
    candidates: list[Variant | Missing] = [
        compared.variant("ours", partial(attention_decode, lengths=lengths)),
        compared.variant("torch eager", eager, "reads the whole cache"),
        compared.variant("torch SDPA", partial(_sdpa, lengths=lengths, scale=scale), "reads the whole cache"),
    ]
    name, flash = "flash-attn with a cache", flash_attn("flash_attn_with_kvcache")
    if isinstance(flash, str) or shape.device != "cuda":
        candidates.append(Missing(name, flash if isinstance(flash, str) else "it has no CPU kernel"))
    else:
        cached = lengths.int()
        candidates.append(compared.variant(name, lambda q, k, v: flash(q[:, None], k, v, cache_seqlens=cached)[:, 0]))
    num_known = int(lengths.sum())
    flops = 4.0 * num_known * shape.heads * shape.head_size  # for q k^T and p v
    num_bytes = 2.0 * num_known * shape.kv_heads * shape.head_size * dtype.itemsize + 2 * q.nbytes
    return Bench(candidates, partial(compared.judge, eager), flops, num_bytes, q.nbytes)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    is_known = (torch.arange(k.shape[1], device=q.device) < lengths[:, None])[:, None, None]  # [S, 1, 1, L]
    heads_first = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=is_known, scale=scale, enable_gqa=True)
    return out[:, :, 0]


CASE = Case("attention_decode", _shapes, _build)
