"""Attention of one new token per sequence over its key-value cache."""

import torch
from torch import Tensor

from marsrl.kernels.attention_decode.cpu import attention_decode_cpu
from marsrl.kernels.attention_decode.reference import attention_decode_reference
from marsrl.kernels.attention_decode.torch_impl import attention_decode_torch
from marsrl.kernels.attention_varlen import positive_scale, why_not_triton_heads
from marsrl.kernels.checks import FLOATS, INTEGERS, check
from marsrl.kernels.dispatch import Implementation, Op, late_function, of_first
from marsrl.kernels.library import why_no_cpu_library, why_not_float_or_bfloat16
from marsrl.kernels.triton_machine import machine_lacks_triton


def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """Compute softmax(scale q k^T) v over the first lengths[s] keys of each sequence.

    Args:
        q: [S, N, D] float, the query of each sequence's newest token.
        k_cache, v_cache: [S, L, N_kv, D] in the dtype of q, N a multiple of N_kv; they already include the newest token.
            Any strides are accepted, so a head-major cache can be passed as a transposed view. Entries beyond lengths[s] do not
            affect the result, but must be finite, because 0 times NaN is NaN.
        lengths: [S] int, number of keys of each sequence, 1..L; on a GPU the host does not read the values.
        scale: any finite number; None = 1 / sqrt(D).

    Returns the attention output, [S, N, D] in the dtype of q. There is no gradient. On a GPU the bits of a sequence's output
    depend neither on the other sequences nor on L.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("attention_decode", "q", q, (None, None, None), FLOATS)
    q, scale = positive_scale("attention_decode", q, scale)
    num_sequences, num_heads, head_size = q.shape
    check("attention_decode", "k_cache", k_cache, (num_sequences, None, None, head_size), (q.dtype,), q.device)
    check("attention_decode", "v_cache", v_cache, tuple(k_cache.shape), (q.dtype,), q.device)
    check("attention_decode", "lengths", lengths, (num_sequences,), INTEGERS, q.device)
    if k_cache.shape[2] == 0 or num_heads % k_cache.shape[2]:
        raise ValueError(
            f"attention_decode: k_cache has {k_cache.shape[2]} heads, expected a divisor of q's {num_heads}"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad):
        raise ValueError("attention_decode: an input requires a gradient, expected a call under torch.no_grad()")
    if lengths.device.type == "cpu" and num_sequences:
        shortest, longest = (int(bound) for bound in lengths.aminmax())
        if shortest < 1 or longest > k_cache.shape[1]:
            raise ValueError(
                f"attention_decode: lengths lie in {shortest}..{longest}, expected 1..{k_cache.shape[1]} (k_cache's L)"
            )
    return _OP(q, k_cache, v_cache, lengths, scale)


_OP = Op(
    "attention_decode",
    (
        Implementation(
            "triton",
            late_function("attention_decode.triton_impl", "attention_decode_triton"),
            why_not_triton_heads,
            machine_lacks_triton,
        ),
        Implementation("cpu", attention_decode_cpu, of_first(why_not_float_or_bfloat16, "q"), why_no_cpu_library),
        Implementation("torch", attention_decode_torch),
        Implementation("reference", attention_decode_reference),
    ),
)
