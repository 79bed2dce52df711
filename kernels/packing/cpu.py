"""The layouts through csrc/cpu/row_layouts.cpp: one copy a sequence, or a row. Arguments as in reference.py."""

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


def row_bytes(values: Tensor, num_dims: int) -> int:
    """Bytes of one row of values, whose first num_dims dimensions count rows."""
    return values.shape[num_dims:].numel() * values.element_size()


def element(values: Tensor, fill: float) -> Tensor:
    """[1] on the CPU: `fill` in the dtype of values."""
    return torch.full((1,), fill, dtype=values.dtype, device="cpu")


def pack_rows(padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    num_sequences, length = padded.shape[:2]
    packed = padded.new_empty(num_tokens, *padded.shape[2:])
    cpu_library().marsrl_pack(
        padded.data_ptr(), packed.data_ptr(), cu_seqlens.data_ptr(), num_sequences, length, row_bytes(padded, 2)
    )
    return packed


def unpack_rows(packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
    num_sequences = cu_seqlens.numel() - 1
    padded = packed.new_empty(num_sequences, length, *packed.shape[1:])
    filling = element(packed, fill)
    cpu_library().marsrl_unpack(
        packed.data_ptr(),
        padded.data_ptr(),
        cu_seqlens.data_ptr(),
        num_sequences,
        length,
        row_bytes(packed, 1),
        filling.data_ptr(),
        filling.element_size(),
    )
    return padded


def kept_ids(mask: Tensor, capacity: int) -> Tensor:
    ids = torch.empty(capacity, dtype=torch.int64, device="cpu")
    kept = cpu_library().marsrl_kept_ids(mask.data_ptr(), mask.numel(), ids.data_ptr(), capacity)
    assert kept == capacity, f"{kept} elements are set, {capacity} were counted"
    return ids


def gather_rows(values: Tensor, ids: Tensor) -> Tensor:
    rows = values.new_empty(ids.numel(), *values.shape[1:])
    cpu_library().marsrl_gather(values.data_ptr(), rows.data_ptr(), ids.data_ptr(), ids.numel(), row_bytes(values, 1))
    return rows


def scatter_rows(values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor:
    out = values.new_empty(num_rows, *values.shape[1:])
    filling = element(values, fill)
    cpu_library().marsrl_scatter(
        values.data_ptr(),
        out.data_ptr(),
        ids.data_ptr(),
        num_rows,
        ids.numel(),
        row_bytes(values, 1),
        filling.data_ptr(),
        filling.element_size(),
    )
    return out
