"""Triton kernels between QuACK's three products: what exponentials need before they stand for the gradient of the logits.

    prepare_rows   the target's place, rows without a coefficient, the factor v of each row
    tile_scales    u, the power of two of each row and tile

A tile is TILE columns with a common k (quack_gemms.py); the largest k of a row is its maximum in log2.
"""

import triton
import triton.language as tl

from marsrl.kernels.head.rows.triton_kernels import VARYING, exact_exp, exact_expm1, token_of

# A target whose tile lies so far below the row's largest (2^-60) has no neighbour of any weight: its tile then takes the row's k.
FAR = tl.constexpr(-60.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def largest_k(row_maximum):
    """The whole number of which the row's maximum is ln 2 times, rounded."""
    return tl.floor(row_maximum * LOG2_E + 0.5)


@triton.jit(do_not_specialize=VARYING)
def prepare_rows(
    exponentials,  # [num_rows, columns] bfloat16
    columns,
    ids,
    first,
    targets,
    inverse_temperature,
    inverse_of_all,
    maxima,  # [num_rows, tiles] float32, k
    tiles,
    slopes,  # [T] arrays of Slopes
    place_of,  # [num_rows] int32 of list_active
    packed,  # [.., columns] bfloat16: receives the rows that have a coefficient; None: rows stay, and the others become 0
    v,  # [rows of packed, or num_rows] float32
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, pieces of columns). v = -c e^-L 2^(largest k) / temperature, and the target's exponential becomes
    (p - 1) e^(L - its k): v u exponential is then c (p - 1) / temperature, with 1 - p through expm1."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PIECE
    end = tl.minimum(begin + PIECE, columns)
    place = tl.load(place_of + row).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if place >= 0:
        token = token_of(ids, first, row)
        inverse = inverse_of_all
        if inverse_temperature is not None:
            inverse = tl.load(inverse_temperature + token)
        logprobs, _entropies, row_maxima, log_sums, coefficient, _entropy_coefficient = slopes
        log_sum = tl.load(log_sums + token)
        target = tl.load(targets + token)
        is_target = (target >= 0) & (target < columns)
        k = tl.load(maxima + row * tiles + target // TILE, mask=is_target, other=0.0)
        below = k - largest_k(tl.load(row_maxima + token))
        is_far = below < FAR
        cleared = tl.where(is_far, target // TILE, -1)  # a tile of which the target alone is left
        at_target = exact_expm1(tl.load(logprobs + token)) * exact_exp(log_sum) * tl.exp2(tl.where(is_far, 0.0, -below))
        if packed is not None:
            for offset in range(begin, end, BLOCK):
                column = offset + lanes
                x = tl.load(exponentials + row * columns + column, mask=column < end, other=0.0).to(tl.float32)
                x = tl.where(column // TILE == cleared, 0.0, x)
                x = tl.where(column == target, at_target, x)
                tl.store(packed + place * columns + column, x.to(tl.bfloat16), mask=column < end)
        else:
            place = row
            if (target >= begin) & (target < end):
                column = target // TILE * TILE + tl.arange(0, TILE)
                at = exponentials + row * columns + column
                x = tl.load(at).to(tl.float32)
                x = tl.where(is_far, 0.0, x)
                tl.store(at, tl.where(column == target, at_target, x).to(tl.bfloat16))
        if begin == 0:
            tl.store(v + place, -tl.load(coefficient + token) * exact_exp(-log_sum) * inverse)
    elif packed is None:
        for offset in range(begin, end, BLOCK):
            column = offset + lanes
            tl.store(exponentials + row * columns + column, tl.zeros((BLOCK,), tl.bfloat16), mask=column < end)
        if begin == 0:
            tl.store(v + row, 0.0)


@triton.jit(do_not_specialize=VARYING)
def tile_scales(
    maxima,  # [num_rows, tiles] float32, k
    num_rows,
    tiles,
    ids,
    first,
    targets,
    row_maxima,  # [T] float32, the largest k times ln 2
    place_of,
    scales,  # [REPEATS tiles, stride] bfloat16: u = 2^(k - largest k), REPEATS times each tile
    stride,
    IS_PACKED: tl.constexpr,
    TILE: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (blocks of rows, blocks of tiles), transposed on the way."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    place = tl.load(place_of + rows, mask=is_row, other=-1).to(tl.int64)
    is_row = is_row & (place >= 0)
    tokens = token_of(ids, first, tl.where(is_row, rows, 0))
    largest = largest_k(tl.load(row_maxima + tokens, mask=is_row, other=0.0))
    of_target = tl.load(targets + tokens, mask=is_row, other=0) // TILE
    is_here = is_row[:, None] & (numbers < tiles)[None, :]
    k = tl.load(maxima + rows[:, None] * tiles + numbers[None, :], mask=is_here, other=0.0)
    below = k - largest[:, None]
    below = tl.where((numbers[None, :] == of_target[:, None]) & (below < FAR), 0.0, below)
    u = tl.trans(tl.exp2(below).to(tl.bfloat16))
    to = place if IS_PACKED else rows
    for repeat in tl.static_range(REPEATS):
        at = scales + (numbers[:, None] * REPEATS + repeat) * stride + to[None, :]
        tl.store(at, u, mask=tl.trans(is_here))
