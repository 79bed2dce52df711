"""attention_varlen: attention within the sequences of a packed batch, never across them."""

from torch import Tensor

from ..checks import FLOATS, check, check_cu_seqlens
from ..dispatch import Implementation, Op
from .cpu import attention_varlen_cpu
from .reference import attention_varlen_reference


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """softmax(scale q k^T) v per sequence, [T, N, D] in the dtype of q, differentiable.

    Args:
        q: [T, N, D] float; k, v: [T_k, N_kv, D], N a multiple of N_kv (grouped queries).
        cu_seqlens: [S+1] int, boundaries of the queries; empty sequences are allowed.
        cu_seqlens_k: [S+1] int, of the keys where they differ: a sequence has at least as many keys as queries.
        scale: None = 1 / sqrt(D).
        causal: a query sees no later key; the last query of a sequence stands at its last key.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("attention_varlen", "q", q, (None, None, None), FLOATS)
    num_tokens, num_heads, head_size = q.shape
    check("attention_varlen", "k", k, (None, None, head_size), (q.dtype,), q.device)
    check("attention_varlen", "v", v, tuple(k.shape), (q.dtype,), q.device)
    if k.shape[1] == 0 or num_heads % k.shape[1]:
        raise ValueError(f"attention_varlen: k has {k.shape[1]} heads, expected a divisor of q's {num_heads}")
    check_cu_seqlens("attention_varlen", cu_seqlens, num_tokens, q.device)
    bounds_q = bounds_k = cu_seqlens.tolist()
    if cu_seqlens_k is None:
        check("attention_varlen", "k", k, (num_tokens, None, head_size), (q.dtype,))
    else:
        check("attention_varlen", "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens.shape), (cu_seqlens.dtype,))
        check_cu_seqlens("attention_varlen", cu_seqlens_k, k.shape[0], q.device, "cu_seqlens_k")
        bounds_k = cu_seqlens_k.tolist()
        for s in range(len(bounds_q) - 1):
            num_queries, num_keys = bounds_q[s + 1] - bounds_q[s], bounds_k[s + 1] - bounds_k[s]
            if num_keys < num_queries:
                raise ValueError(
                    f"attention_varlen: cu_seqlens_k gives sequence {s} {num_keys} keys for {num_queries} queries, "
                    "expected at least as many keys"
                )
    return _OP(q, k, v, bounds_q, bounds_k, head_size**-0.5 if scale is None else scale, causal)


def _why_not_cpu(q: Tensor, *_: object) -> str | None:
    return None if q.device.type == "cpu" else f"q is on {q.device}, this one is for the CPU"


_OP = Op(
    "attention_varlen",
    (
        Implementation("cpu", attention_varlen_cpu, _why_not_cpu),
        Implementation("reference", attention_varlen_reference),
    ),
)
