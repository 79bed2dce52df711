"""Grouped GEMMs as Triton kernels: each expert's matrix times the expert's rows, whose number only the device knows.

As in attention_varlen, the grid follows from shapes. The rows of expert e begin at ends[e-1], and its row tiles at number
ends[e-1] // BLOCK + e. A program finds its expert by bisection. Sums are float32, in a fixed order, without atomics.
"""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

from marsrl.kernels.attention_varlen.triton_kernels import sequence_of_tile


@triton.jit
def rows_of(ends, expert):
    """Return an expert's first row and the row after its last, both int64."""
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    return begin, tl.load(ends + expert).to(tl.int64)


@triton.jit
def rows_times_matrices(
    x,
    matrices,
    out,
    ends,
    num_experts,
    num_in,
    num_out,
    stride_x,
    stride_expert,
    stride_out_column,
    stride_in_column,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute out = x @ matrix.T for the rows and the matrix of each expert.

    x: [T, num_in]. matrices: [num_experts, num_out, num_in], which may be a transposed view. out: [T, num_out].
    """
    num_column_tiles = tl.cdiv(num_out, BLOCK_N)
    column = tl.program_id(0) % num_column_tiles  # programs with neighbouring ids share rows
    tile = tl.program_id(0) // num_column_tiles
    expert = sequence_of_tile(ends - 1, tile, num_experts, BLOCK_M)  # the boundary before expert 0 is never read
    begin, end = rows_of(ends, expert)
    first = begin + (tile - expert - begin // BLOCK_M) * BLOCK_M
    if first >= end:
        return
    rows = tl.arange(0, BLOCK_M)
    is_row = first + rows < end
    outs = column * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    x_at = x + first * stride_x + rows[:, None] * stride_x + depth[None, :]
    matrix_at = matrices + expert.to(tl.int64) * stride_expert
    matrix_at += outs.to(tl.int64)[:, None] * stride_out_column + depth[None, :] * stride_in_column
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, num_in, BLOCK_K):
        is_in = start + depth < num_in
        x_tile = tl.load(x_at, mask=is_row[:, None] & is_in[None, :], other=0.0)
        matrix_tile = tl.load(matrix_at, mask=(outs[:, None] < num_out) & is_in[None, :], other=0.0)
        total = tl.dot(x_tile, tl.trans(matrix_tile), total, input_precision="ieee")
        x_at += BLOCK_K
        matrix_at += BLOCK_K * stride_in_column
    out_at = out + first * num_out + rows[:, None] * num_out + outs[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[:, None] & (outs[None, :] < num_out))


@triton.jit
def matrix_gradients(
    x,
    grad_out,
    out,
    ends,
    num_in,
    num_out,
    stride_x,
    stride_grad,
    stride_expert,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute out = grad_out.T @ x over the rows of each expert; 0 for experts without rows.

    x: [T, num_in]. grad_out: [T, num_out]. out: [E, num_out, num_in].
    stride_expert: distance between two experts' matrices in out, in elements; each matrix is contiguous.
    ADDS: accumulate into out; the matrices of experts without rows then stay unchanged.
    """
    num_in_tiles = tl.cdiv(num_in, BLOCK_N)
    num_tiles = tl.cdiv(num_out, BLOCK_M) * num_in_tiles
    expert = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    begin, end = rows_of(ends, expert)
    outs = tile // num_in_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    ins = tile % num_in_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    num_rows = (end - begin).to(tl.int32)
    for start in range(0, num_rows, BLOCK_K):
        is_row = start + depth < num_rows
        first = begin + start
        grad_at = grad_out + first * stride_grad + depth[:, None] * stride_grad + outs[None, :]
        x_at = x + first * stride_x + depth[:, None] * stride_x + ins[None, :]
        grad_tile = tl.load(grad_at, mask=is_row[:, None] & (outs[None, :] < num_out), other=0.0)
        x_tile = tl.load(x_at, mask=is_row[:, None] & (ins[None, :] < num_in), other=0.0)
        total = tl.dot(tl.trans(grad_tile), x_tile, total, input_precision="ieee")
    out_rows = out + expert.to(tl.int64) * stride_expert + outs.to(tl.int64)[:, None] * num_in
    if ADDS:
        # Write the tile in two halves. A whole tile in registers, besides the sums, would leave room for only one program per
        # multiprocessor on Hopper.
        HALF: tl.constexpr = BLOCK_N // 2
        halves = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        for half in tl.static_range(2):
            columns = tile % num_in_tiles * BLOCK_N + half * HALF + tl.arange(0, HALF)
            out_at = out_rows + columns[None, :]
            is_out = (begin < end) & (outs[:, None] < num_out) & (columns[None, :] < num_in)
            tl.store(out_at, tl.load(out_at, mask=is_out, other=0.0) + halves[half], mask=is_out)
    else:
        out_at = out_rows + ins[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=(outs[:, None] < num_out) & (ins[None, :] < num_in))
