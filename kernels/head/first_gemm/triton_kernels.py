"""The first GEMM of a head as Triton kernels: what its epilogue makes of a tile of logits, which never leaves the registers.

first_product             with loads by pointers, a program a tile: any strides, any GPU
first_product_by_copies   tiles by the copy engine of sm_90 (TMA), programs that stay and take one tile after the other
exponential_gradients     dz of the rows that have a coefficient, from the exponentials that either has left
"""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from marsrl.kernels.head.rows.triton_kernels import (
    LOWEST,
    NOTHING,
    VARYING,
    gradient_of,
    slopes_at,
    token_of,
    with_target,
)

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns). Groups of GROUP row tiles walk along the vocabulary: their hidden states stay in
    the L2 cache, and a tile of the weight is read by all of them at about the same time."""
    group = program // (GROUP * column_tiles)
    rest = program % (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + rest % size, rest // size


@triton.jit
def exponent_above(maximum, inverse):
    """k float64, the least integer with e^(maximum inverse) <= 2^k: what the exponentials of a row in a tile are
    relative to. An integer, so that to go from one tile's to another's is exact."""
    return tl.ceil(maximum.to(tl.float64) * inverse.to(tl.float64) * LOG2_E)


@triton.jit
def halves(x):
    """The columns of x [M, N] in two: each [M, N / 2]."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def put_part(out, stride, begin_row, begin_column, num_rows, values):
    """Store values [M, N] at these rows and columns of out: a descriptor where stride is None, else rows of `stride`
    elements. What lies behind the last row or column is not stored."""
    if stride is None:
        out.store([begin_row, begin_column], values.to(out.dtype))
    else:
        row = begin_row + tl.arange(0, values.shape[0])
        column = begin_column + tl.arange(0, values.shape[1])
        at = out + row[:, None].to(tl.int64) * stride + column[None, :]
        is_in = (row < num_rows)[:, None] & (column < stride)[None, :]
        tl.store(at, values.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def sums_and_exponentials(
    x,
    begin_row,
    begin_column,
    num_rows,
    target,
    maximum,
    inverse,
    scale,
    out,
    stride,
    PARTS: tl.constexpr,
    OFFSET: tl.constexpr = 0,
):
    """Sums of e^d, d e^d and the target's x, over the columns of x [M, N], which is -inf in padding, PARTS at a time, for
    registers. To out, if that is not None, scale e^d; 0 at the target. OFFSET: of x in its tile, as target is in that."""
    if PARTS > 1:
        low, high = halves(x)
        a, b, c = sums_and_exponentials(
            low, begin_row, begin_column, num_rows, target, maximum, inverse, scale, out, stride, PARTS // 2, OFFSET
        )
        d, e, f = sums_and_exponentials(
            high, begin_row, begin_column, num_rows, target, maximum, inverse, scale, out, stride, PARTS // 2,
            OFFSET + x.shape[1] // 2,
        )  # fmt: skip
        return a + d, b + e, c + f
    else:
        d = (x - maximum[:, None]) * inverse[:, None]  # centred first: exactly 0 at the maximum
        e = tl.exp(d)
        weighted = tl.maximum(d, NOTHING) * e  # minus infinity times 0 would be NaN
        is_target = (tl.arange(0, x.shape[1]) + OFFSET)[None, :] == target[:, None]
        if out is not None:
            part = tl.where(is_target, 0.0, e * scale[:, None])
            put_part(out, stride, begin_row, begin_column + OFFSET, num_rows, part)
        return tl.sum(e, axis=1), tl.sum(weighted, axis=1), tl.sum(tl.where(is_target, x, 0.0), axis=1)


@triton.jit
def put_gradients(
    x, begin_row, begin_column, num_rows, columns, target, inverse, of_row, out, stride, PARTS: tl.constexpr
):
    """To out dz of the columns of x [M, N], PARTS at a time; 0 in padding."""
    if PARTS > 1:
        low, high = halves(x)
        middle = begin_column + x.shape[1] // 2
        put_gradients(low, begin_row, begin_column, num_rows, columns, target, inverse, of_row, out, stride, PARTS // 2)
        put_gradients(high, begin_row, middle, num_rows, columns, target, inverse, of_row, out, stride, PARTS // 2)
    else:
        maximum, log_sum, entropy, c, e, at_target = of_row
        column = begin_column + tl.arange(0, x.shape[1])
        logp = (x - maximum[:, None]) * inverse[:, None] - log_sum[:, None]
        logp = tl.where(logp < NOTHING, NOTHING, logp)  # a logit of -inf: p = 0, not 0 times infinity
        dz = gradient_of(tl.exp(logp), logp, entropy[:, None], c[:, None], e[:, None], inverse[:, None])
        dz = with_target(dz, at_target[:, None], column[None, :], target[:, None], columns)
        put_part(out, stride, begin_row, begin_column, num_rows, dz)


@triton.jit
def finish_tile(
    x,  # [M, N] logits
    begin_row,
    column_tile,
    column_tiles,
    num_rows,
    columns,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,
    inverse_of_all,
    out,
    stride,
    pieces,
    known,
    PARTS: tl.constexpr,
):
    """The epilogue of both kernels, whose arguments these are."""
    begin_column = column_tile * x.shape[1]
    row = begin_row + tl.arange(0, x.shape[0])
    is_row = row < num_rows
    tokens = token_of(ids, first, tl.where(is_row, row, 0).to(tl.int64))
    inverse = tl.full([x.shape[0]], 0.0, tl.float32) + inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + tokens)
    target = tl.load(targets + tokens) - first_column
    target = tl.where((target >= 0) & (target < columns), target, -1).to(tl.int32)
    if known is not None:
        of_row = slopes_at(known, tokens, inverse)
        put_gradients(x, begin_row, begin_column, num_rows, columns, target, inverse, of_row, out, stride, PARTS)
    else:
        is_real = begin_column + tl.arange(0, x.shape[1]) < columns
        x = tl.where(is_real[None, :], x, float("-inf"))
        maximum = tl.maximum(tl.max(x, axis=1), LOWEST)
        scaled = maximum.to(tl.float64) * inverse.to(tl.float64) * LOG2_E
        scale = tl.exp2((scaled - exponent_above(maximum, inverse)).to(tl.float32))
        total, weighted, logit = sums_and_exponentials(
            x, begin_row, begin_column, num_rows, target - begin_column, maximum, inverse, scale, out, stride, PARTS
        )
        at = pieces + column_tile * num_rows + row
        plane = column_tiles * num_rows
        tl.store(at, maximum, mask=is_row)
        tl.store(at + plane, total, mask=is_row)
        tl.store(at + 2 * plane, weighted, mask=is_row)
        tl.store(at + 3 * plane, logit, mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def first_product(
    hidden,  # [num_rows, size] bfloat16 or float16
    weight,  # [columns, size] of the same dtype
    stride_hidden_row,
    stride_hidden,
    stride_weight_row,
    stride_weight,
    num_rows,
    columns,  # real ones: padding is not read, and is 0 in out
    size,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,  # [T] or None
    inverse_of_all,
    out,  # [num_rows, stride], exponentials or, where something is known, dz; None: not wanted
    stride,
    pieces,  # [4, column tiles, num_rows] float32; None where something is known
    known,  # [T] arrays of Slopes, or None
    column_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_K divides size
):
    """Grid (row tiles * column tiles)."""
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), column_tiles, GROUP)
    begin_row = row_tile * BLOCK_M
    begin_column = column_tile * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # What lies behind the last row or column is a copy of it: no mask in the loop, and nothing of it is stored.
    own_row = tl.minimum(begin_row + row, num_rows - 1).to(tl.int64)
    own_column = tl.minimum(begin_column + column, columns - 1).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    h_at = hidden + own_row[:, None] * stride_hidden_row + depth[None, :] * stride_hidden
    w_at = weight + own_column[:, None] * stride_weight_row + depth[None, :] * stride_weight
    for start in range(0, size, BLOCK_K):
        if IS_EVEN:
            h = tl.load(h_at)
            w = tl.load(w_at)
        else:
            is_in = (start + depth < size)[None, :]
            h = tl.load(h_at, mask=is_in, other=0.0)
            w = tl.load(w_at, mask=is_in, other=0.0)
        total = tl.dot(h, tl.trans(w), total)
        h_at += BLOCK_K * stride_hidden
        w_at += BLOCK_K * stride_weight
    finish_tile(
        total, begin_row, column_tile, column_tiles, num_rows, columns, ids, first, targets, first_column,
        inverse_temperature, inverse_of_all, out, stride, pieces, known, PARTS,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def first_product_by_copies(
    hidden,  # descriptor of [num_rows, size] in blocks of BLOCK_M by BLOCK_K
    weight,  # of [columns, size] in blocks of BLOCK_N by BLOCK_K
    num_rows,
    columns,
    size,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,
    inverse_of_all,
    out,  # descriptor of [num_rows, width] in blocks of BLOCK_M by BLOCK_N / PARTS; None: not wanted
    pieces,
    known,
    column_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Grid (programs that fit the device at once). What lies behind the last row, column or unit is read as 0. One loop
    of both, so that the first operands of a tile are on their way while the epilogue of the one before runs."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, GROUP)
        begin_row = row_tile * BLOCK_M
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            h = hidden.load([begin_row, start])
            w = weight.load([column_tile * BLOCK_N, start])
            total = tl.dot(h, w.T, total)
        finish_tile(
            total, begin_row, column_tile, column_tiles, num_rows, columns, ids, first, targets, first_column,
            inverse_temperature, inverse_of_all, out, None, pieces, known, PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def exponential_gradients(
    exponentials,  # [num_rows, stride]
    stride,
    columns,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,
    inverse_of_all,
    maxima,  # [tiles, num_pieces]: the first plane of the pieces
    num_pieces,
    slopes,  # [T] arrays of Slopes
    place_of,  # None: every row has its own place
    out,  # [.., out_stride] of the GEMM's dtype; 0 behind the real columns
    out_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # of a step
    PIECE: tl.constexpr,  # tiles of a program
    HAS_ENTROPY: tl.constexpr,  # entropy_coefficient is read, and with it the logarithm of every exponential
):
    """Grid (num_rows, pieces). p = e 2^k / e^(maximum / tau + log_sum): log p is off by as much as e was rounded."""
    row = tl.program_id(0).to(tl.int64)
    place = row
    if place_of is not None:
        place = tl.load(place_of + row).to(tl.int64)
    if place >= 0:
        token = token_of(ids, first, row)
        inverse = inverse_of_all
        if inverse_temperature is not None:
            inverse = tl.load(inverse_temperature + token)
        maximum, log_sum, entropy, c, e, at_target = slopes_at(slopes, token, inverse)
        target = tl.load(targets + token) - first_column
        own = maximum.to(tl.float64) * inverse + log_sum
        begin = tl.program_id(1) * PIECE
        for tile in range(begin, tl.minimum(begin + PIECE, tl.cdiv(out_stride, TILE)), TILES):
            tiles = tile + tl.arange(0, TILES)
            column = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
            of_tile = tl.load(maxima + tiles * num_pieces + row, mask=tiles * TILE < columns, other=0.0)
            log_scale = (exponent_above(of_tile, inverse) * LN_2 - own).to(tl.float32)
            x = tl.load(exponentials + row * stride + column, mask=column < stride, other=0.0).to(tl.float32)
            p = x * tl.exp(log_scale)[:, None]
            if HAS_ENTROPY:
                # an exponential that is 0, or came from a tile of nothing: p = 0, and its log is finite
                logp = tl.maximum(tl.log(x) + log_scale[:, None], NOTHING)
                dz = gradient_of(p, logp, entropy, c, e, inverse)
            else:
                dz = -p * c * inverse
            dz = with_target(dz, at_target, column, target, columns)
            tl.store(out + place * out_stride + column, dz.to(out.dtype.element_ty), mask=column < out_stride)
