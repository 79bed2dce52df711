"""The layouts in Triton: rows as words of 1 to 8 bytes, so that one kernel moves every dtype bit for bit.

Arguments as in reference.py. One program moves BLOCK_ROWS rows by BLOCK_WORDS words; the grid has one axis, because the
others end at 65535.
"""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.triton_machine import on_device_of

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_WORDS_OF_PROGRAM = 1024
_TOKENS_OF_PROGRAM = 1024  # of a mask


@triton.jit
def _padded_row_of(cu_seqlens, token, num_sequences, length, steps):
    """The row s * length + l that packed tokens come from; -1: none. `steps` halvings find one of num_sequences."""
    low = tl.zeros_like(token)
    high = low + num_sequences
    for _ in range(steps):
        middle = (low + high) >> 1  # low itself once they are neighbours
        is_left = tl.load(cu_seqlens + middle) <= token
        low = tl.where(is_left, middle, low)
        high = tl.where(is_left, high, middle)
    place = token - tl.load(cu_seqlens + low)
    is_covered = (token < tl.load(cu_seqlens + num_sequences)) & (place < length)
    return tl.where(is_covered, low * length + place, -1)


@triton.jit
def _token_of(cu_seqlens, row, length, num_tokens, is_row):
    """The packed token that padded rows hold; -1: none."""
    sequence = row // length
    token = tl.load(cu_seqlens + sequence, mask=is_row, other=0) + row % length
    end = tl.load(cu_seqlens + sequence + 1, mask=is_row, other=0)
    return tl.where((token < end) & (token < num_tokens), token, -1)


@triton.jit(do_not_specialize=["fill"])
def _move_rows(
    source,
    out,
    index,  # cu_seqlens [S+1], or ids [rows]
    rows,
    words,
    num_sequences,
    length,
    num_source_rows,
    num_out_rows,
    steps,
    fill,
    LAYOUT: tl.constexpr,  # pack | unpack | gather | scatter
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """One output row from one input row; scatter: one input row to one output row."""
    parts = tl.cdiv(words, BLOCK_WORDS)
    program = tl.program_id(0).to(tl.int64)
    row = (program // parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    word = (program % parts) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    is_row, is_word = row < rows, word < words
    if LAYOUT == "pack":
        place = _padded_row_of(index, row, num_sequences, length, steps)
    elif LAYOUT == "unpack":
        place = _token_of(index, row, length, num_source_rows, is_row)
    else:
        place = tl.load(index + row, mask=is_row, other=-1)
    here, there = row, place  # rows of out, of source
    limit = num_source_rows
    if LAYOUT == "scatter":
        here, there = place, row
        is_row = is_row & (place >= 0) & (place < num_out_rows)
        limit = rows
    is_read = is_row & (there >= 0) & (there < limit)
    values = tl.load(
        source + there[:, None] * words + word[None, :], mask=is_read[:, None] & is_word[None, :], other=fill
    )
    tl.store(out + here[:, None] * words + word[None, :], values, mask=is_row[:, None] & is_word[None, :])


@triton.jit
def _count_kept(mask, counts, num_tokens, BLOCK: tl.constexpr):
    """counts[i] = how many tokens of the i-th part of the mask are set."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_kept = tl.load(mask + token, mask=token < num_tokens, other=0)
    tl.store(counts + tl.program_id(0), tl.sum(is_kept.to(tl.int64)))


@triton.jit
def _place_kept(mask, counts, ids, num_tokens, capacity, BLOCK: tl.constexpr):
    """ids[k] = the k-th token that is set."""
    program = tl.program_id(0)
    before = tl.zeros((), tl.int64)
    for begin in range(0, program, BLOCK):
        part = begin + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(counts + part, mask=part < program, other=0))
    token = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_kept = tl.load(mask + token, mask=token < num_tokens, other=0).to(tl.int64)
    place = before + tl.cumsum(is_kept) - is_kept
    tl.store(ids + place, token, mask=(is_kept != 0) & (place < capacity))


def _move(
    layout: str,
    source: Tensor,
    out: Tensor,
    index: Tensor,
    rows: int,
    num_source_rows: int,
    num_out_rows: int,
    fill: float = 0,
    num_sequences: int = 0,
    length: int = 1,
) -> None:
    """Launch for `rows` rows; source and out are contiguous and have rows of the same size."""
    if rows == 0 or source.numel() == 0 or out.numel() == 0:
        if layout != "scatter":  # nothing to read: all rows are filled
            out.fill_(fill)
        return
    size = out.numel() * out.element_size() // num_out_rows
    places = size | int(source.storage_offset()) * source.element_size()
    width = next(width for width in _WORDS if places % width == 0)
    words = size // width
    count = max(1, width // out.element_size())
    pattern = torch.full((count,), fill, dtype=out.dtype, device="cpu").view(_WORDS[width])
    block_words = min(triton.next_power_of_2(words), _WORDS_OF_PROGRAM)
    block_rows = _WORDS_OF_PROGRAM // block_words
    with on_device_of(source):
        _move_rows[(triton.cdiv(rows, block_rows) * triton.cdiv(words, block_words),)](
            source.reshape(-1).view(_WORDS[width]),
            out.reshape(-1).view(_WORDS[width]),
            index,
            rows,
            words,
            num_sequences,
            length,
            num_source_rows,
            num_out_rows,
            max(num_sequences, 1).bit_length(),
            int(pattern[0]),
            LAYOUT=layout,
            BLOCK_ROWS=block_rows,
            BLOCK_WORDS=block_words,
        )


def pack_rows(padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    num_sequences, length = padded.shape[:2]
    packed = padded.new_empty(num_tokens, *padded.shape[2:])
    _move(
        "pack",
        padded,
        packed,
        cu_seqlens,
        num_tokens,
        num_source_rows=num_sequences * length,
        num_out_rows=num_tokens,
        num_sequences=num_sequences,
        length=length,
    )
    return packed


def unpack_rows(packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
    num_sequences = cu_seqlens.numel() - 1
    padded = packed.new_empty(num_sequences, length, *packed.shape[1:])
    rows = num_sequences * length
    _move("unpack", packed, padded, cu_seqlens, rows, packed.shape[0], rows, fill, length=length)
    return padded


def kept_ids(mask: Tensor, capacity: int) -> Tensor:
    ids = torch.full((capacity,), -1, dtype=torch.int64, device=mask.device)
    num_tokens = mask.numel()
    if num_tokens == 0 or capacity == 0:
        return ids
    parts = triton.cdiv(num_tokens, _TOKENS_OF_PROGRAM)
    counts = ids.new_empty(parts)
    with on_device_of(mask):
        bits = mask.view(torch.uint8)
        _count_kept[(parts,)](bits, counts, num_tokens, BLOCK=_TOKENS_OF_PROGRAM)
        _place_kept[(parts,)](bits, counts, ids, num_tokens, capacity, BLOCK=_TOKENS_OF_PROGRAM)
    return ids


def gather_rows(values: Tensor, ids: Tensor) -> Tensor:
    rows = values.new_empty(ids.numel(), *values.shape[1:])
    _move("gather", values, rows, ids, ids.numel(), values.shape[0], ids.numel())
    return rows


def scatter_rows(values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor:
    out = values.new_full((num_rows, *values.shape[1:]), fill)
    _move("scatter", values, out, ids, ids.numel(), ids.numel(), num_rows)
    return out
