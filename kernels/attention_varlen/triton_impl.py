"""Packed attention on a GPU by our Triton kernels: launches and tile sizes. The host never waits for the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.attention_varlen.triton_kernels import (
    attention_forward,
    attention_key_gradients,
    attention_query_gradient,
)
from marsrl.kernels.checks import rows_dense
from marsrl.kernels.triton_machine import on_device_of

LOG2_E = log2(e)


@dataclass(frozen=True)
class Tiles:
    """Tile size (m queries by n keys) and launch options."""

    m: int
    n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TilePlan:
    forward: Tiles
    query_gradient: Tiles
    key_gradients: Tiles


def plan_tiles(head_size: int, dtype: torch.dtype) -> TilePlan:
    """Choose tile sizes that fit the registers of sm_80 and sm_90.

    test_ops_ahead_of_time.py checks the compiled code.
    """
    if dtype == torch.float32:  # no tensor cores: exact float32 products
        size = 32 if head_size <= 64 else 16
        return TilePlan(*(Tiles(32, size, 8, 1),) * 2, Tiles(size, 32, 8, 1))
    if head_size <= 64:
        return TilePlan(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2))
    if head_size <= 128:
        return TilePlan(Tiles(128, 64, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 2))
    return TilePlan(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2))


class TritonAttention:
    """Kernels of attention_varlen; `forward` returns the output and the log-sum-exp [N, T] of each query."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        cu_seqlens_k: Tensor,
        scale: float,
        causal: bool,
        max_seqlen: int | None,  # unused: the grid does not depend on it
        deterministic: bool,  # unused: the kernels are always deterministic
    ) -> tuple[Tensor, Tensor]:
        q, k, v, cu_seqlens, cu_seqlens_k = _as_read(q, k, v, cu_seqlens, cu_seqlens_k)
        num_tokens, num_heads, head_size = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q.device)
        tiles = plan_tiles(head_size, q.dtype).forward
        if num_tokens:
            with on_device_of(q):
                attention_forward[(_num_tiles(q, cu_seqlens, tiles.m) * num_heads,)](
                    q, k, v, out, lse, cu_seqlens, cu_seqlens_k,
                    cu_seqlens.numel() - 1, num_tokens, num_heads, scale * LOG2_E,
                    *_strides(q), *_strides(k), *_strides(v),
                    **_constants(q, k, causal, tiles),
                )  # fmt: skip
        return out, lse

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, cu_seqlens, cu_seqlens_k = _as_read(*args[:5])
        scale, causal = args[5:7]
        out, lse = saved
        grad_out = rows_dense(grads[0])
        num_tokens, num_heads, head_size = q.shape
        num_key_heads = k.shape[1]
        delta = torch.empty_like(lse)
        grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        sizes = (cu_seqlens.numel() - 1, num_tokens)
        scales = (scale, scale * LOG2_E)
        strides = (*_strides(q), *_strides(k), *_strides(v), *_strides(grad_out))
        plan = plan_tiles(head_size, q.dtype)
        with on_device_of(q):
            if num_tokens:
                attention_query_gradient[(_num_tiles(q, cu_seqlens, plan.query_gradient.m) * num_heads,)](
                    q, k, v, out, grad_out, lse, delta, grad_q, cu_seqlens, cu_seqlens_k,
                    *sizes, num_heads, *scales, *strides,
                    **_constants(q, k, causal, plan.query_gradient),
                )  # fmt: skip
            if k.shape[0]:
                attention_key_gradients[(_num_tiles(k, cu_seqlens_k, plan.key_gradients.n) * num_key_heads,)](
                    q, k, v, grad_out, lse, delta, grad_k, grad_v, cu_seqlens, cu_seqlens_k,
                    *sizes, num_key_heads, *scales, *strides,
                    **_constants(q, k, causal, plan.key_gradients),
                )  # fmt: skip
        return grad_q, grad_k, grad_v, None, None


def _as_read(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs as the kernels read them, copied where necessary.

    q, k and v need a dense head dimension, and the boundaries must be contiguous. Views of a fused qkv projection are therefore
    read in place.
    """
    return *map(rows_dense, (q, k, v)), cu_seqlens.contiguous(), cu_seqlens_k.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)


def _num_tiles(x: Tensor, cu_seqlens: Tensor, size: int) -> int:
    """Return an upper bound of the number of tiles, computed from shapes alone; see triton_kernels.py."""
    return x.shape[0] // size + cu_seqlens.numel() - 1


def _constants(q: Tensor, k: Tensor, causal: bool, tiles: Tiles) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_SIZE": q.shape[2],
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "IS_CAUSAL": causal,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
