"""Triton kernels around QuACK's product: row offsets before the product, statistics and dz after it.

row_offsets    computes the offset m of each row from its target's logit
finish_rows    computes log-prob, entropy and log_sum of a row from the tiles' partial sums
prepare_rows   computes the factor v of each row, and changes its exponentials so that v times them is dz
"""

import triton
import triton.language as tl

from marsrl.kernels.head.rows.triton_kernels import VARYING, exact_exp, exact_expm1, token_of

# Largest allowed sum of exponentials relative to the target: about 1 / p of the target, so log p is at least -69.
MOST = tl.constexpr(2.0**100)


@triton.jit
def inverse_of(inverse_temperature, inverse_of_all, token):
    inverse = inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + token)
    return inverse


@triton.jit(do_not_specialize=VARYING)
def row_offsets(
    hidden,  # [T, size] bfloat16
    weight,  # [columns, size] bfloat16
    size,
    columns,
    num_rows,
    ids,
    first,
    targets,
    inverse_temperature,
    inverse_of_all,
    of_rows,  # [3, stride] float32: inverse temperature, m, and space for the target's logit
    stride,
    BLOCK: tl.constexpr,
):
    """Compute the offset m of each row. Grid (rows, including padding rows).

    m is 0 for padding rows, and for rows whose target is outside the vocabulary.
    """
    row = tl.program_id(0).to(tl.int64)
    is_row = row < num_rows
    token = token_of(ids, first, tl.where(is_row, row, 0))
    inverse = inverse_of(inverse_temperature, inverse_of_all, token)
    target = tl.load(targets + token)
    is_read = is_row & (target >= 0) & (target < columns)
    products = tl.zeros((BLOCK,), tl.float32)
    for offset in range(0, size, BLOCK):
        lanes = offset + tl.arange(0, BLOCK)
        is_here = (lanes < size) & is_read
        x = tl.load(hidden + token * size + lanes, mask=is_here, other=0.0).to(tl.float32)
        products += x * tl.load(weight + target * size + lanes, mask=is_here, other=0.0).to(tl.float32)
    tl.store(of_rows + row, tl.where(is_row, inverse, 0.0))
    tl.store(of_rows + stride + row, tl.sum(products, axis=0) * inverse)
    tl.store(of_rows + 2 * stride + row, 0.0)


@triton.jit(do_not_specialize=VARYING)
def finish_rows(
    totals,  # [num_rows, tiles] float32
    weighted,  # [num_rows, tiles] float32
    tiles,
    columns,
    of_rows,  # [3, stride] float32: inverse temperature, m and the target's logit
    stride,
    ids,
    first,
    targets,
    statistics,  # [T] arrays of Statistics
    is_beyond,  # [1] int32: becomes 1 if a sum exceeds MOST
    BLOCK: tl.constexpr,
):
    """Compute statistics from each row's partial sums.

    A target outside the vocabulary gets log-prob NaN. Grid (num_rows).
    """
    row = tl.program_id(0).to(tl.int64)
    token = token_of(ids, first, row)
    lanes = tl.arange(0, BLOCK)
    is_tile = lanes < tiles
    total = tl.sum(tl.load(totals + row * tiles + lanes, mask=is_tile, other=0.0).to(tl.float64), axis=0)
    exponents = tl.sum(tl.load(weighted + row * tiles + lanes, mask=is_tile, other=0.0).to(tl.float64), axis=0)
    m = tl.load(of_rows + stride + row)
    log_sum = tl.log(total)
    logp = tl.load(of_rows + 2 * stride + row).to(tl.float64) - m - log_sum
    logp = tl.where(logp > 0, 0.0, logp)  # rounding can make it positive; NaN stays
    target = tl.load(targets + token)
    logp = tl.where((target >= 0) & (target < columns), logp, float("nan"))
    logprobs, entropy, maxima, log_sums = statistics
    tl.store(logprobs + token, logp.to(tl.float32))
    tl.store(entropy + token, (log_sum - exponents / total).to(tl.float32))
    tl.store(maxima + token, m)
    tl.store(log_sums + token, log_sum.to(tl.float32))
    if total > MOST:
        tl.store(is_beyond, 1)


@triton.jit(do_not_specialize=VARYING)
def prepare_rows(
    exponentials,  # [num_rows, columns] bfloat16
    columns,
    ids,
    first,
    targets,
    inverse_temperature,
    inverse_of_all,
    slopes,  # [T] arrays of Slopes
    place_of,  # [num_rows] int32, from list_active
    packed,  # [.., columns] bfloat16: receives the active rows; None: rows stay in place, and inactive rows become 0
    v,  # [rows of packed, or num_rows] float32
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Change exponentials and compute v, so that v times exponentials is dz.

    Grid (num_rows, pieces of columns).

    v = -c / (temperature sum). The target's exponential becomes (p - 1) sum, and its dz is then c (1 - p) / temperature; 1 - p is
    computed by expm1.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * PIECE
    end = tl.minimum(begin + PIECE, columns)
    position = tl.load(place_of + row).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if position >= 0:
        token = token_of(ids, first, row)
        logprobs, _entropy, _maxima, log_sums, coefficient, _entropy_coefficient = slopes
        log_sum = tl.load(log_sums + token)
        target = tl.load(targets + token)
        at_target = (exact_expm1(tl.load(logprobs + token)) * exact_exp(log_sum)).to(tl.bfloat16)
        if packed is not None:
            for offset in range(begin, end, BLOCK):
                column = offset + lanes
                x = tl.load(exponentials + row * columns + column, mask=column < end, other=0.0)
                tl.store(
                    packed + position * columns + column, tl.where(column == target, at_target, x), mask=column < end
                )
        else:
            position = row
            if (target >= begin) & (target < end):
                tl.store(exponentials + row * columns + target, at_target)
        if begin == 0:
            inverse = inverse_of(inverse_temperature, inverse_of_all, token)
            tl.store(v + position, -tl.load(coefficient + token) * exact_exp(-log_sum) * inverse)
    elif packed is None:
        for offset in range(begin, end, BLOCK):
            column = offset + lanes
            tl.store(exponentials + row * columns + column, tl.zeros((BLOCK,), tl.bfloat16), mask=column < end)
        if begin == 0:
            tl.store(v + row, 0.0)
