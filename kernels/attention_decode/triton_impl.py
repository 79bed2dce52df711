"""Launches of the Triton kernels for decoding attention. The host never waits for the GPU."""

from math import e, log2

import torch
from torch import Tensor

from marsrl.kernels.attention_decode.triton_kernels import decode_split, decode_sum
from marsrl.kernels.checks import rows_dense
from marsrl.kernels.triton_machine import on_device_of

LOG2_E = log2(e)
# Keys per split, the work of one program. The grid has S x N_kv x L / 512 programs: 256 for S = N_kv = 8 and L = 2048, which
# fills a GPU.
SPLIT = 512


def attention_decode_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Return the output [S, N, D] that reference.py defines."""
    q, k_cache, v_cache = map(rows_dense, (q, k_cache, v_cache))
    num_sequences, num_heads, head_size = q.shape
    capacity, num_key_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_sequences == 0:
        return out
    num_splits = -(-capacity // SPLIT)
    partial = torch.empty(num_sequences, num_heads, num_splits, head_size, dtype=torch.float32, device=q.device)
    maxima, totals = torch.empty(2, num_sequences, num_heads, num_splits, dtype=torch.float32, device=q.device)
    group = num_heads // num_key_heads
    lengths = lengths.contiguous()
    with on_device_of(q):
        decode_split[(num_sequences * num_key_heads, num_splits)](
            q, k_cache, v_cache, partial, maxima, totals, lengths,
            num_splits, num_key_heads, scale * LOG2_E,
            *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            GROUP=group,
            BLOCK_G=max(16, 1 << (group - 1).bit_length()),
            HEAD_SIZE=head_size,
            BLOCK_N=32 if head_size > 128 or q.dtype == torch.float32 else 64,
            SPLIT=SPLIT,
            num_warps=4,
            num_stages=2,
        )  # fmt: skip
        decode_sum[(num_sequences * num_heads,)](
            partial, maxima, totals, lengths, out, num_splits, num_heads, HEAD_SIZE=head_size, SPLIT=SPLIT, num_warps=1
        )
    return out
