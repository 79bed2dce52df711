"""Deltas of `sync.delta`: values of a bucket that have changed since the last transfer, and their positions.

Message for a bucket of n numbers, of which c have changed:

    counts, int32  |  values [c] in the bucket's dtype  |  positions [c] in their blocks, 2 bytes each

counts: number of changed values in each block of 65536 elements.

A changed bfloat16 value takes 4 bytes, so a delta is shorter than the bucket while fewer than half of the values have changed. A
bitmap (n / 8 bytes) would be shorter than positions if more than 1/16 had changed; a step of RL changes 1/100 to 1/20.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 16
_BITS = {2: torch.int16, 4: torch.int32}  # integer dtypes for comparing bits, by bytes per number


def differs(now: Tensor, before: Tensor) -> Tensor:
    """Return a mask of elements whose bits differ; 0.0 and -0.0 differ. Both have the same shape and dtype, of 2 or 4 bytes."""
    bits = _BITS[now.itemsize]
    return now.view(bits) != before.view(bits)


def encode_delta(flat: Tensor, changed: Tensor, num_changed: int) -> Tensor | None:
    """Encode the changed elements of a flat bucket [n] as a message [bytes] uint8. changed: [n] bool, True at num_changed
    elements.

    Returns None if the message would not be shorter than the bucket.
    """
    num_blocks = _num_blocks(len(flat))
    if 4 * num_blocks + num_changed * (flat.itemsize + 2) >= flat.nbytes:
        return None
    index = changed.nonzero().view(-1)
    counts = torch.searchsorted(index, _starts(num_blocks + 1, flat.device)).diff().int()
    # short() keeps the low 16 bits, the position within the block.
    return torch.cat([each.view(torch.uint8) for each in (counts, flat[index], index.short())])


def decode_delta(message: Tensor, num_elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode a message for a bucket of num_elements.

    Returns (positions [c] int64 of the changed elements in the bucket, ascending; their new values [c]).
    """
    num_blocks = _num_blocks(num_elements)
    num_changed = (len(message) - 4 * num_blocks) // (dtype.itemsize + 2)
    counts, values, places = message.split([4 * num_blocks, num_changed * dtype.itemsize, num_changed * 2])
    inside = places.view(torch.int16).long() & (_BLOCK - 1)
    starts = _starts(num_blocks, message.device)
    return starts.repeat_interleave(counts.view(torch.int32)) + inside, values.view(dtype)


def _num_blocks(num_elements: int) -> int:
    return -(-num_elements // _BLOCK)


def _starts(num_blocks: int, device: torch.device) -> Tensor:
    return torch.arange(num_blocks, device=device) * _BLOCK
