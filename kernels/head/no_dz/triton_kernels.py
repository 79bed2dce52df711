"""The products of dX and dW as Triton kernels whose left operand is made of exponentials while it is loaded.

row_factors           what each row, and each of its tiles, has in common
hidden_gradient       dX of a block of rows; the target's part in the epilogue
weight_gradient       dW of a block of columns without the targets' part
add_target_rows       the targets' part of dW
"""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from marsrl.kernels.head.first_gemm.triton_kernels import LN_2, exponent_above
from marsrl.kernels.head.rows.triton_kernels import VARYING, gradient_of_target, token_of


@triton.jit(do_not_specialize=VARYING)
def row_factors(
    num_rows,
    columns,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,
    inverse_of_all,
    maxima,  # [tiles, num_pieces]: the first plane of the pieces
    num_pieces,
    tiles,
    logprobs,
    maximum_of,
    log_sum_of,
    coefficient,
    place_of,  # None: every row has its own place
    # by place
    row_at,  # [num_rows] int32: the row
    token_at,  # [num_rows] int64: its token
    factor_at,  # [num_rows] float32: f
    gradient_at,  # [num_rows] float32: g
    target_at,  # [num_rows] int32: in this shard, else untouched
    scales,  # [tiles, num_rows] float32: 2^(k - K), 0 below 2^-126
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (blocks of rows, blocks of tiles)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    place = rows
    if place_of is not None:
        place = tl.load(place_of + rows, mask=is_row, other=-1)
        is_row = is_row & (place >= 0)
    tokens = token_of(ids, first, tl.where(is_row, rows, 0).to(tl.int64))
    inverse = tl.full([BLOCK], 0.0, tl.float32) + inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + tokens)
    maximum = tl.load(maximum_of + tokens)
    of_row = exponent_above(maximum, inverse)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    is_in = (tile < tiles)[:, None] & is_row[None, :]
    own = tl.load(maxima + tile[:, None] * num_pieces + rows[None, :], mask=is_in, other=0.0)
    shift = exponent_above(own, inverse[None, :]) - of_row[None, :]
    shift = tl.where(shift > -127.0, tl.where(shift < 0.0, shift, 0.0), -127.0)  # a NaN too: f is NaN where that is one
    scale = ((shift.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + tile[:, None] * num_rows + place[None, :], scale, mask=is_in)
    if tl.program_id(1) == 0:
        c = tl.load(coefficient + tokens)
        log_factor = of_row * LN_2 - (maximum.to(tl.float64) * inverse + tl.load(log_sum_of + tokens))
        f = -c * inverse * tl.exp(log_factor).to(tl.float32)
        g = gradient_of_target(tl.load(logprobs + tokens), 0.0, c, 0.0, inverse)
        target = tl.load(targets + tokens) - first_column
        is_here = is_row & (target >= 0) & (target < columns)
        tl.store(row_at + place, rows, mask=is_row)
        tl.store(token_at + place, tokens, mask=is_row)
        tl.store(factor_at + place, f, mask=is_row)
        tl.store(gradient_at + place, g, mask=is_row)
        tl.store(target_at + place, target.to(tl.int32), mask=is_here)


@triton.jit
def units_of(rows, stride, unit, size, WHOLE: tl.constexpr):
    """The hidden units of these rows [N, 1]; 0 behind the last."""
    at = rows + unit.to(tl.int64)[None, :] * stride
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(unit < size)[None, :], other=0.0)


@triton.jit(do_not_specialize=VARYING)
def hidden_gradient(
    exponentials,  # [num_rows, stride] bfloat16
    stride,
    weight,  # [columns, size] bfloat16
    stride_weight_row,
    stride_weight,
    num_rows,
    columns,
    size,
    count,  # [1] int32: rows that have a place
    row_at,
    token_at,
    factor_at,
    gradient_at,
    target_at,
    scales,
    out,  # [T, size]
    TILE: tl.constexpr,  # columns that share a scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides TILE
    IS_EVEN: tl.constexpr,  # BLOCK_K divides stride
    WHOLE: tl.constexpr,  # BLOCK_N divides size
):
    """Grid (row tiles * size tiles)."""
    size_tiles = tl.cdiv(size, BLOCK_N)
    begin = (tl.program_id(0) // size_tiles) * BLOCK_M
    last = tl.load(count) - 1
    if begin <= last:
        unit = (tl.program_id(0) % size_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = begin + tl.arange(0, BLOCK_M)
        own = tl.minimum(place, last)  # behind the last row: a copy of it, which is not stored
        row = tl.load(row_at + own).to(tl.int64)
        step = tl.arange(0, BLOCK_K)
        at = exponentials + row[:, None] * stride + step[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, columns, BLOCK_K):
            if IS_EVEN:
                x = tl.load(at + start)
            else:
                x = tl.load(at + start, mask=(start + step < stride)[None, :], other=0.0)
            scale = tl.load(scales + (start // TILE) * num_rows + own)
            # 0 times a copy of the last column where the exponentials are padding
            column = tl.minimum(start + step, columns - 1).to(tl.int64)
            w = units_of(weight + column[:, None] * stride_weight_row, stride_weight, unit, size, WHOLE)
            x = (x.to(tl.float32) * scale[:, None]).to(w.dtype)
            total = tl.dot(x, w, total)
        target = tl.load(target_at + own)
        is_here = target < columns
        g = tl.where(is_here, tl.load(gradient_at + own), 0.0)
        of_target = tl.where(is_here, target, 0).to(tl.int64)
        w = units_of(weight + of_target[:, None] * stride_weight_row, stride_weight, unit, size, WHOLE)
        total = total * tl.load(factor_at + own)[:, None] + g[:, None] * w.to(tl.float32)
        to = out + tl.load(token_at + own)[:, None] * size + unit[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=(place <= last)[:, None] & (unit < size)[None, :])


@triton.jit(do_not_specialize=VARYING)
def weight_gradient(
    exponentials,
    stride,
    hidden,  # [T, size] bfloat16
    stride_hidden_row,
    stride_hidden,
    num_rows,
    columns,
    width,  # columns with padding, where dW is 0
    size,
    count,
    row_at,
    token_at,
    factor_at,
    scales,
    total_of,  # [width, size] float32
    factor,  # of what is added
    ADDS: tl.constexpr,  # to what total_of holds; else that is written
    BLOCK_M: tl.constexpr,  # columns that share a scale
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_M divides stride
    WHOLE: tl.constexpr,  # BLOCK_N divides size
):
    """Grid (tiles of columns * size tiles)."""
    size_tiles = tl.cdiv(size, BLOCK_N)
    tile = tl.program_id(0) // size_tiles
    column = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = (tl.program_id(0) % size_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(count)
    if tile * BLOCK_M >= columns:
        rows = rows * 0
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, rows, BLOCK_K):
        place = begin + tl.arange(0, BLOCK_K)
        own = tl.minimum(place, rows - 1)
        row = tl.load(row_at + own).to(tl.int64)
        token = tl.load(token_at + own)
        f = tl.load(factor_at + own) * tl.load(scales + tile * num_rows + own)
        f = tl.where(place < rows, f, 0.0)
        at = exponentials + row[None, :] * stride + column[:, None]
        if IS_EVEN:  # what lies behind the real columns is in rows of dW that become 0
            x = tl.load(at)
        else:
            x = tl.load(at, mask=(column < stride)[:, None], other=0.0)
        h = units_of(hidden + token[:, None] * stride_hidden_row, stride_hidden, unit, size, WHOLE)
        x = (x.to(tl.float32) * f[None, :]).to(h.dtype)
        total = tl.dot(x, h, total)
    at = total_of + column.to(tl.int64)[:, None] * size + unit[None, :]
    is_in = (column < width)[:, None] & (unit < size)[None, :]
    total = tl.where((column < columns)[:, None], total, 0.0) * factor
    if ADDS:
        total += tl.load(at, mask=is_in, other=0.0)
    tl.store(at, total, mask=is_in)


@triton.jit
def add_target_rows(
    order,  # [n] int64: places, those of one target side by side, in the order of the rows
    begin_of,  # [n] int64: where the target of each of them begins in order
    end_of,
    target_at,
    token_at,
    gradient_at,
    columns,
    hidden,
    stride_hidden_row,
    stride_hidden,
    size,
    total_of,
    factor,
    BLOCK: tl.constexpr,
):
    """Grid (n, size blocks): the first place of a target adds all of them."""
    first = tl.program_id(0).to(tl.int64)
    target = tl.load(target_at + tl.load(order + first)).to(tl.int64)
    if (tl.load(begin_of + first) == first) & (target < columns):
        unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for number in range(first, tl.load(end_of + first)):
            place = tl.load(order + number)
            at = hidden + tl.load(token_at + place) * stride_hidden_row + unit.to(tl.int64) * stride_hidden
            total += tl.load(gradient_at + place) * tl.load(at, mask=unit < size, other=0.0).to(tl.float32)
        to = total_of + target * size + unit
        tl.store(to, tl.load(to, mask=unit < size, other=0.0) + factor * total, mask=unit < size)
