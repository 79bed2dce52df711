"""Sums over the tokens of packed sequences in Triton: one program per sequence, which adds blocks of tokens in order."""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.triton_machine import on_device_of

_BLOCK = 1024


@triton.jit
def _sequence_sums(values, mask, cu_seqlens, sums, num_sequences, BLOCK: tl.constexpr):
    """Compute the sum of each sequence's values in the mask, and their number, into sums [2, S]."""
    sequence = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(cu_seqlens + sequence).to(tl.int64), tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.float64)
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        is_kept = token < end
        if mask is not None:
            is_kept = tl.load(mask + token, mask=is_kept, other=0) != 0
        value = tl.load(values + token, mask=is_kept, other=0.0)
        if value.dtype != tl.float64:
            value = value.to(tl.float32)
        total += tl.sum(value.to(tl.float64))
        count += tl.sum(is_kept.to(tl.float64))
    tl.store(sums + sequence, total)
    tl.store(sums + num_sequences + sequence, count)


def sequence_sums_triton(values: Tensor, mask: Tensor | None, cu_seqlens: Tensor) -> Tensor:
    """Return the sums and numbers of tokens, [2, S], that reference.py defines."""
    num_sequences = cu_seqlens.numel() - 1
    sums = torch.empty(2, num_sequences, dtype=torch.float64, device=values.device)
    if num_sequences:
        with on_device_of(values):
            _sequence_sums[(num_sequences,)](
                values.contiguous(),
                None if mask is None else mask.contiguous().view(torch.uint8),
                cu_seqlens.contiguous(),
                sums,
                num_sequences,
                BLOCK=_BLOCK,
            )
    return sums
