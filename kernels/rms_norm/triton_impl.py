"""RMSNorm and a rotation after it in Triton.

A program holds whole rows; the weight's gradient is summed over programs in a fixed order.
"""
# mypy: disallow-untyped-defs=False

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.triton_machine import on_device_of

ELEMENTS = 2048  # elements per program for rows of at most this length: 16 per thread
PROGRAMS = 512  # upper bound of the backward's programs, each of which has a partial sum of the weight's gradient


@triton.jit
def _cos_and_sin(rotation, token, column, is_in, half):
    """Load each column's cosine, and its sine, negated in the first half of the columns."""
    at = rotation + token * 2 * half + (column % half)[None, :]
    sin = tl.load(at + half, mask=is_in, other=0.0)
    return tl.load(at, mask=is_in, other=0.0), tl.where((column < half)[None, :], -sin, sin)


@triton.jit(do_not_specialize=["num_rows"])
def forward_rows(
    x, stride, weight, rotation, rows_of_token, out, scales, num_rows, width, half, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm and rotate rows. Grid (blocks of rows).

    rotation: [tokens, width] float32 or None; each row applies to rows_of_token consecutive rows of x. half: width / 2.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_in = is_row[:, None] & (column < width)[None, :]
    row64 = row[:, None].to(tl.int64)
    values = tl.load(x + row64 * stride + column[None, :], mask=is_in, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(scales + row, scale, mask=is_row)
    normed = values * scale[:, None] * factor[None, :]
    if rotation is not None:
        pair = (column + half) % width  # the other column of each rotated pair
        pairs = tl.load(x + row64 * stride + pair[None, :], mask=is_in, other=0.0).to(tl.float32) * scale[:, None]
        pairs *= (tl.load(weight + pair, mask=column < width, other=0.0).to(tl.float32) + offset)[None, :]
        cos, sin = _cos_and_sin(rotation, row64 // rows_of_token, column, is_in, half)
        normed = normed * cos + pairs * sin
    tl.store(out + row64 * width + column[None, :], normed.to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows", "rows_of_program"])
def gradient_rows(
    x, stride, weight, rotation, rows_of_token, scales, grad, grad_rows, sums, num_rows, rows_of_program, width, half, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of rows. Grid (programs); each program takes rows_of_program consecutive rows.

    sums [programs, width] float32 receives each program's part of the weight's gradient.
    """
    begin = tl.program_id(0) * rows_of_program
    column = tl.arange(0, BLOCK)
    is_column = column < width
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32) + offset
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, rows_of_program, ROWS):
        row = begin + first + tl.arange(0, ROWS)
        is_row = row < num_rows
        is_in = is_row[:, None] & is_column[None, :]
        row64 = row[:, None].to(tl.int64)
        scale = tl.load(scales + row, mask=is_row, other=0.0)[:, None]
        normed = tl.load(x + row64 * stride + column[None, :], mask=is_in, other=0.0).to(tl.float32) * scale
        d = tl.load(grad + row64 * width + column[None, :], mask=is_in, other=0.0).to(tl.float32)
        if rotation is not None:
            pair = (column + half) % width
            pairs = tl.load(grad + row64 * width + pair[None, :], mask=is_in, other=0.0).to(tl.float32)
            cos, sin = _cos_and_sin(rotation, row64 // rows_of_token, column, is_in, half)
            d = d * cos - pairs * sin  # the inverse rotation
        total += d * normed
        d *= factor[None, :]
        mean = tl.sum(d * normed, axis=1) / width
        gradient = scale * (d - normed * mean[:, None])
        tl.store(grad_rows + row64 * width + column[None, :], gradient.to(grad_rows.dtype.element_ty), mask=is_in)
    at = sums + tl.program_id(0).to(tl.int64) * width + column
    tl.store(at, tl.sum(total, axis=0), mask=is_column)


def _tile(width: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a program.

    They depend only on the width, so a row's bits do not depend on other rows.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // block)
    return rows, block, max(4, rows * block // 512)


def _of_tokens(rows: Tensor, rotation: Tensor | None) -> tuple[Tensor | None, int]:
    """Return the rotation, and the number of rows per token."""
    return (None, 1) if rotation is None else (rotation.contiguous(), rows.shape[0] // rotation.shape[0])


class TritonRmsNorm:
    """Kernels of rms_norm on the current stream."""

    def forward(
        self, rows: Tensor, weight: Tensor, rotation: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, width = rows.shape
        out = torch.empty(num_rows, width, dtype=rows.dtype, device=rows.device)
        scales = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
        if out.numel():
            tile, block, warps = _tile(width)
            with on_device_of(rows):
                forward_rows[(triton.cdiv(num_rows, tile),)](
                    rows, rows.stride(0), weight.contiguous(), *_of_tokens(rows, rotation), out, scales,
                    num_rows, width, width // 2, eps, offset,
                    ROWS=tile, BLOCK=block, num_warps=warps,
                )  # fmt: skip
        return out, scales

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor, None]:
        rows, weight, rotation, _, offset = args
        grad = grads[0].contiguous()
        num_rows, width = rows.shape
        grad_rows = torch.empty(num_rows, width, dtype=rows.dtype, device=rows.device)
        if not grad_rows.numel():
            return grad_rows, torch.zeros_like(weight, memory_format=torch.contiguous_format), None
        tile, block, warps = _tile(width)
        rows_of_program = triton.cdiv(triton.cdiv(num_rows, tile), PROGRAMS) * tile
        programs = triton.cdiv(num_rows, rows_of_program)
        sums = torch.empty(programs, width, dtype=torch.float32, device=rows.device)
        with on_device_of(rows):
            gradient_rows[(programs,)](
                rows, rows.stride(0), weight.contiguous(), *_of_tokens(rows, rotation), saved[0], grad, grad_rows, sums,
                num_rows, rows_of_program, width, width // 2, offset, ROWS=tile, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        return grad_rows, sums.sum(0).to(weight.dtype), None
