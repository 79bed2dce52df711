"""The first GEMM of a head as a Triton kernel whose epilogue takes the statistics of a tile from its accumulators."""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from marsrl.kernels.head.rows.triton_kernels import LOWEST, NOTHING, VARYING, token_of


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns). Groups of GROUP row tiles walk along the vocabulary: their hidden states stay in
    the L2 cache, and a tile of the weight is read by all of them at about the same time."""
    group = program // (GROUP * column_tiles)
    rest = program % (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + rest % size, rest // size


@triton.jit
def softmax_sums(x, column, target, maximum, inverse, PARTS: tl.constexpr):
    """Sums of e^d, d e^d and x where column == target, over the columns of x [M, N]; PARTS at a time, for registers."""
    if PARTS > 1:
        low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
        low_column, high_column = tl.split(tl.permute(tl.reshape(column, [2, x.shape[1] // 2]), [1, 0]))
        a, b, c = softmax_sums(low, low_column, target, maximum, inverse, PARTS // 2)
        d, e, f = softmax_sums(high, high_column, target, maximum, inverse, PARTS // 2)
        return a + d, b + e, c + f
    else:
        d = (x - maximum[:, None]) * inverse[:, None]  # centred first: exactly 0 at the maximum
        e = tl.exp(d)
        weighted = tl.maximum(d, NOTHING) * e  # minus infinity times 0 would be NaN
        logit = tl.where(column[None, :] == target[:, None], x, 0.0)
        return tl.sum(e, axis=1), tl.sum(weighted, axis=1), tl.sum(logit, axis=1)


@triton.jit(do_not_specialize=VARYING)
def logits_and_pieces(
    hidden,  # [num_rows, size] bfloat16 or float16
    weight,  # [columns, size] of the same dtype
    stride_hidden_row,
    stride_hidden,
    stride_weight_row,
    stride_weight,
    logits,  # [num_rows, stride_logits] float32, None: they are not written
    stride_logits,
    num_rows,
    columns,  # real ones: padding is neither read nor written
    size,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,  # [T] or None
    inverse_of_all,
    pieces,  # [4, column tiles, num_rows] float32
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # BLOCK_K divides size
):
    """Grid (row tiles * column tiles)."""
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(columns, BLOCK_N)
    row_tile, column_tile = tile_of(tl.program_id(0), row_tiles, column_tiles, GROUP)
    begin_row = row_tile * BLOCK_M
    begin_column = column_tile * BLOCK_N
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # What lies behind the last row or column is a copy of it: no mask in the loop, and nothing of it is stored.
    own_row = begin_row.to(tl.int64) + tl.minimum(row, num_rows - 1 - begin_row)
    own_column = begin_column.to(tl.int64) + tl.minimum(column, columns - 1 - begin_column)
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

    is_row = begin_row + row < num_rows
    is_real = begin_column + column < columns
    if logits is not None:
        at = logits + begin_row.to(tl.int64) * stride_logits + begin_column
        at += row[:, None].to(tl.int64) * stride_logits + column[None, :]
        tl.store(at, total, mask=is_row[:, None] & is_real[None, :])

    tokens = token_of(ids, first, tl.where(is_row, begin_row + row, 0).to(tl.int64))
    inverse = tl.full([BLOCK_M], 0.0, tl.float32) + inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + tokens)
    target = tl.load(targets + tokens) - first_column - begin_column
    target = tl.where((target >= 0) & (target < BLOCK_N), target, -1).to(tl.int32)

    x = tl.where(is_real[None, :], total, float("-inf"))
    maximum = tl.maximum(tl.max(x, axis=1), LOWEST)
    sum_of_e, weighted, logit = softmax_sums(x, column, target, maximum, inverse, PARTS)
    at = pieces + column_tile * num_rows + begin_row + row
    plane = column_tiles * num_rows
    tl.store(at, maximum, mask=is_row)
    tl.store(at + plane, sum_of_e, mask=is_row)
    tl.store(at + 2 * plane, weighted, mask=is_row)
    tl.store(at + 3 * plane, logit, mask=is_row)
