"""The layouts through csrc/cuda/row_layouts.cu: every output row is one gather. Arguments as in reference.py."""

import torch
from torch import Tensor

from marsrl.kernels.cuda_library import cuda_library, queue
from marsrl.kernels.packing.cpu import element, row_bytes


def pack_rows(padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    packed = padded.new_empty(num_tokens, *padded.shape[2:])
    filling = element(padded, 0)
    queue(
        "pack",
        padded,
        padded.data_ptr(),
        packed.data_ptr(),
        cu_seqlens.data_ptr(),
        *padded.shape[:2],
        num_tokens,
        row_bytes(padded, 2),
        filling.data_ptr(),
        filling.element_size(),
    )
    return packed


def unpack_rows(packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
    num_sequences = cu_seqlens.numel() - 1
    padded = packed.new_empty(num_sequences, length, *packed.shape[1:])
    filling = element(packed, fill)
    queue(
        "unpack",
        packed,
        packed.data_ptr(),
        padded.data_ptr(),
        cu_seqlens.data_ptr(),
        num_sequences,
        length,
        packed.shape[0],
        row_bytes(packed, 1),
        filling.data_ptr(),
        filling.element_size(),
    )
    return padded


def kept_ids(mask: Tensor, capacity: int) -> Tensor:
    ids = torch.empty(capacity, dtype=torch.int64, device=mask.device)
    scratch = ids.new_empty(cuda_library().marsrl_cuda_kept_scratch(mask.numel()))
    queue("kept_ids", mask, mask.data_ptr(), mask.numel(), ids.data_ptr(), capacity, scratch.data_ptr())
    return ids


def gather_rows(values: Tensor, ids: Tensor) -> Tensor:
    rows = values.new_empty(ids.numel(), *values.shape[1:])
    filling = element(values, 0)
    queue(
        "gather",
        values,
        values.data_ptr(),
        rows.data_ptr(),
        ids.data_ptr(),
        values.shape[0],
        ids.numel(),
        row_bytes(values, 1),
        filling.data_ptr(),
        filling.element_size(),
    )
    return rows


def scatter_rows(values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor:
    out = values.new_full((num_rows, *values.shape[1:]), fill)
    queue(
        "scatter",
        values,
        values.data_ptr(),
        out.data_ptr(),
        ids.data_ptr(),
        num_rows,
        ids.numel(),
        row_bytes(values, 1),
    )
    return out
