"""The layouts in plain PyTorch: every output row is one input row, or filled. The definition."""

import torch
from torch import Tensor


def pack_rows(padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T, ...] from padded [S, L, ...]; cu_seqlens [S+1] int64. A token that no sequence covers is 0."""
    num_sequences, length = padded.shape[:2]
    token = torch.arange(num_tokens, device=padded.device)
    sequence = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(0, max(num_sequences - 1, 0))
    place = token - cu_seqlens[sequence]
    source = torch.where((token < cu_seqlens[-1]) & (place < length), sequence * length + place, -1)
    return gather_rows(padded.flatten(0, 1), source)


def unpack_rows(packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
    """[S, L, ...] from packed [T, ...]; what no token covers is filled."""
    place = torch.arange(length, device=packed.device)
    token = cu_seqlens[:-1, None] + place
    source = torch.where((token < cu_seqlens[1:, None]) & (token < packed.shape[0]), token, -1)  # [S, L]
    return gather_rows(packed, source.flatten(), fill).unflatten(0, source.shape)


def kept_ids(mask: Tensor, capacity: int) -> Tensor:
    """[capacity] int64: where mask [T] is set, ascending, then -1."""
    ids = mask.nonzero()[:capacity, 0]
    return torch.cat((ids, ids.new_full((capacity - ids.numel(),), -1)))


def gather_rows(values: Tensor, ids: Tensor, fill: float = 0) -> Tensor:
    """values[ids], filled where an id is -1."""
    if values.shape[0] == 0:
        return values.new_full((ids.numel(), *values.shape[1:]), fill)
    rows = values.index_select(0, ids.clamp(min=0))
    rows[ids < 0] = fill
    return rows


def scatter_rows(values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor:
    """[num_rows, ...] with values [K, ...] at ids and `fill` elsewhere; an id outside is skipped."""
    out = values.new_full((num_rows, *values.shape[1:]), fill)
    is_inside = (ids >= 0) & (ids < num_rows)
    out[ids[is_inside]] = values[is_inside]
    return out
