"""Attention within the sequences of a packed batch, never across them."""

from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.attention_varlen import flash
from marsrl.kernels.attention_varlen.cpu import attention_varlen_cpu
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference
from marsrl.kernels.checks import FLOATS, check, check_cu_seqlens
from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.dispatch import Implementation, Op, of_first, why_not_host
from marsrl.kernels.traced_op import register
from marsrl.kernels.triton_machine import machine_lacks_cuda, why_not_triton_float32


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    max_seqlen: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Compute softmax(scale q k^T) v per sequence; differentiable.

    Args:
        q: [T, N, D] float; k, v: [T_k, N_kv, D], N a multiple of N_kv (grouped queries).
        cu_seqlens: [S+1] int, boundaries of the sequences in q; empty sequences are allowed.
        cu_seqlens_k: [S+1] int, boundaries of the sequences in k and v, each with at least as many keys as queries. None:
            the same as cu_seqlens.
        scale: any finite number; None = 1 / sqrt(D).
        causal: True if a query attends to no later key; the last query of a sequence is aligned with its last key.
        max_seqlen: upper bound of the sequence lengths, with which flash-attn launches fewer blocks. None: the number of tokens.
        deterministic: make the gradient bitwise reproducible, as it always is with our own kernels. flash-attn 2 then needs
            several copies of the gradient of q, each of 4 T N D bytes, which it adds in order.

    Returns the attention output, [T, N, D] in the dtype of q. The call never synchronises with the GPU, so the values of a
    cu_seqlens on a GPU are not checked.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("attention_varlen", "q", q, (None, None, None), FLOATS)
    q, scale = positive_scale("attention_varlen", q, scale)
    args = (q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, max_seqlen, deterministic)
    if torch.compiler.is_compiling():
        traced: Tensor = torch.ops.marsrl.attention_varlen(*args)[0]
        return traced
    return _OP(*_checked(*args))


def positive_scale(op: str, q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Return equivalent (queries, scale) with a positive scale.

    Some kernels take the maximum of the scores before they apply the scale.
    """
    if scale is None:
        return q, q.shape[-1] ** -0.5
    if not isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}, expected a finite number or None")
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    scale: float,
    causal: bool,
    max_seqlen: int | None,
    deterministic: bool,
) -> tuple[Any, ...]:
    num_tokens, num_heads, head_size = q.shape
    check("attention_varlen", "k", k, (None, None, head_size), (q.dtype,), q.device)
    check("attention_varlen", "v", v, tuple(k.shape), (q.dtype,), q.device)
    if k.shape[1] == 0 or num_heads % k.shape[1]:
        raise ValueError(f"attention_varlen: k has {k.shape[1]} heads, expected a divisor of q's {num_heads}")
    check_cu_seqlens("attention_varlen", cu_seqlens, num_tokens, q.device)
    if cu_seqlens_k is None:
        check("attention_varlen", "k", k, (num_tokens, None, head_size), (q.dtype,))
        cu_seqlens_k = cu_seqlens
    else:
        check("attention_varlen", "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens.shape), (cu_seqlens.dtype,))
        check_cu_seqlens("attention_varlen", cu_seqlens_k, k.shape[0], q.device, "cu_seqlens_k")
        if q.device.type == "cpu" and (lacks := cu_seqlens_k.diff() < cu_seqlens.diff()).any():
            s = int(lacks.nonzero()[0])
            raise ValueError(
                f"attention_varlen: cu_seqlens_k gives sequence {s} {int(cu_seqlens_k.diff()[s])} keys for "
                f"{int(cu_seqlens.diff()[s])} queries, expected at least as many keys"
            )
    return q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, max_seqlen, deterministic


def _results(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Allocate the output and the log-sum-exp of every head and query."""
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def why_not_triton_heads(q: Tensor, *_: object) -> str | None:
    """Return None if our Triton kernels support queries [..., D], else the reason."""
    head_size = q.shape[2]
    if head_size & (head_size - 1) or not 16 <= head_size <= 256:
        return f"head size {head_size}, the kernels support 16, 32, 64, 128 and 256"
    return why_not_triton_float32("q", q)


_GRADIENT = Gradient("attention_varlen", num_tensors=5, saves_outputs=True)
_OP = Op(
    "attention_varlen",
    (
        *(
            Implementation(
                version.name,
                partial(flash.attention_varlen_flash, version),
                partial(flash.why_not, version),
                partial(flash.machine_lacks, version),
            )
            for version in (flash.FLASH_4, flash.FLASH_3, flash.FLASH_2)
        ),
        Implementation("torch", flash.attention_varlen_torch, flash.why_not_varlen_attn, machine_lacks_cuda),
        _GRADIENT.triton("attention_varlen.triton_impl", "TritonAttention", why_not_triton_heads),
        Implementation("cpu", attention_varlen_cpu, of_first(why_not_host, "q")),
        _GRADIENT.reference(attention_varlen_reference),
    ),
)
register(
    _OP,
    _GRADIENT,
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, float scale, bool causal, "
    "SymInt? max_seqlen, bool deterministic",
    _results,
    2,
    _checked,
)
