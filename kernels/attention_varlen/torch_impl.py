"""Packed attention by PyTorch's varlen_attn, flash-attn 2's kernels as PyTorch carries them. Not run on a GPU here."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.attention_varlen.flash import why_not_flash_kernels

_NEEDED = {"window_size", "enable_gqa", "scale"}  # its first releases cannot be told all of these
_MOST_HEAD_SIZE = 256


def machine_lacks_varlen_attn() -> str | None:
    """None where this PyTorch has it and a GPU is there, else the reason."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    missing = _NEEDED - _words()
    return f"varlen_attn of PyTorch {torch.__version__} lacks {', '.join(sorted(missing))}" if missing else None


def why_not_varlen_attn(q: Tensor, *others: Any) -> str | None:
    """None where it can serve these arguments, of which `deterministic` is the last, else the reason."""
    if others[-1] and not torch.are_deterministic_algorithms_enabled():
        return "its backward is deterministic under torch.use_deterministic_algorithms(True) only"
    return why_not_flash_kernels(q, _MOST_HEAD_SIZE)


def attention_varlen_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    max_seqlen: int | None = None,
    deterministic: bool = False,  # see why_not_varlen_attn
) -> Tensor:
    """[T, N, D] as the reference defines it; autograd is PyTorch's."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        q,
        k,
        v,
        cu_seqlens.int(),
        cu_seqlens_k.int(),
        max_seqlen or q.shape[0],
        max_seqlen or k.shape[0],
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)  # a pair only where the log-sum-exp is asked for
    return output


@cache
def _words() -> frozenset[str]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
