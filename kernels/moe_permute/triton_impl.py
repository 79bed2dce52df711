"""Copies of tokens to rows, and sums of rows, in Triton. The host never waits for the device.

A program has one token and one block of columns. It reads the token once and writes it to all of its rows, or sums the rows one
after the other, without atomics.
"""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.checks import rows_dense
from marsrl.kernels.moe_permute.two_moves import Moves, Permute, Unpermute
from marsrl.kernels.triton_machine import on_device_of

WIDEST = 2048  # columns per program: 16 per thread


@triton.jit
def copy_tokens(tokens, stride, row_of, bounds, out, width, BLOCK: tl.constexpr):
    """Copy each token to all of its rows. Grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    values = tl.load(tokens + token * stride + column, mask=is_in)
    for index in range(tl.load(bounds + token), tl.load(bounds + token + 1)):
        tl.store(out + tl.load(row_of + index) * width + column, values, mask=is_in)


@triton.jit
def sum_rows(rows, stride, row_of, bounds, out, width, BLOCK: tl.constexpr):
    """Sum the rows of each token. Grid (tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(bounds + token), tl.load(bounds + token + 1)):
        total += tl.load(rows + tl.load(row_of + index) * stride + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=is_in)


def _copies(tokens: Tensor, token_of: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    out = torch.empty(row_of.numel(), tokens.shape[1], dtype=tokens.dtype, device=tokens.device)
    _launch(copy_tokens, tokens, row_of, bounds, out)
    return out


def _sums(rows: Tensor, row_of: Tensor, bounds: Tensor) -> Tensor:
    out = torch.empty(bounds.numel() - 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    _launch(sum_rows, rows, row_of, bounds, out)
    return out


def _launch(kernel: triton.JITFunction, x: Tensor, row_of: Tensor, bounds: Tensor, out: Tensor) -> None:
    num_tokens, width = bounds.numel() - 1, x.shape[1]
    if num_tokens and width:
        x, block = rows_dense(x), min(WIDEST, triton.next_power_of_2(width))
        grid = (num_tokens, triton.cdiv(width, block))
        with on_device_of(x):
            kernel[grid](x, x.stride(0), row_of.contiguous(), bounds.contiguous(), out, width, BLOCK=block)


_MOVES = Moves(_copies, _sums)


def triton_permute() -> Permute:
    return Permute(_MOVES)


def triton_unpermute() -> Unpermute:
    return Unpermute(_MOVES)
