"""SwiGLU in Triton. The backward's programs take whole rows, so that a row's weight gradient is summed in a fixed order."""
# mypy: disallow-untyped-defs=False

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.swiglu.cpu import weights_as_read
from marsrl.kernels.triton_machine import on_device_of

ELEMENTS = 2048  # elements per program: 16 per thread
WIDEST = 1024  # largest number of columns per block


@triton.jit
def _gate_and_up(products, row, column, is_in, width):
    at = products + row[:, None].to(tl.int64) * 2 * width + column[None, :]
    gate = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=is_in, other=0.0).to(tl.float32)
    return gate, up


@triton.jit(do_not_specialize=["num_rows"])
def forward_rows(products, weights, out, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(gate) * up * weight. Grid (blocks of rows, blocks of columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = (row < num_rows)[:, None] & (column < width)[None, :]
    gate, up = _gate_and_up(products, row, column, is_in, width)
    activated = gate * tl.sigmoid(gate) * up
    if weights is not None:
        activated *= tl.load(weights + row, mask=row < num_rows, other=0.0)[:, None]
    at = out + row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(at, activated.to(out.dtype.element_ty), mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def gradient_rows(
    products, weights, grad, grad_products, grad_weights, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute gradients of rows.

    Grid (blocks of rows); a program loops over the columns and sums each weight's gradient.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    weight = tl.full([ROWS], 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + row, mask=is_row, other=0.0)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_in = is_row[:, None] & (column < width)[None, :]
        gate, up = _gate_and_up(products, row, column, is_in, width)
        row64 = row[:, None].to(tl.int64)
        d = tl.load(grad + row64 * width + column[None, :], mask=is_in, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        silu = gate * s
        sums += d * silu * up
        d *= weight[:, None]
        at = grad_products + row64 * 2 * width + column[None, :]
        # The derivative of silu is s + silu (1 - s).
        tl.store(at, (d * up * (s + silu * (1.0 - s))).to(grad_products.dtype.element_ty), mask=is_in)
        tl.store(at + width, (d * silu).to(grad_products.dtype.element_ty), mask=is_in)
    if grad_weights is not None:
        tl.store(grad_weights + row, tl.sum(sums, axis=1), mask=is_row)


def _tile(width: int) -> tuple[int, int]:
    """Return (rows, columns) of a program.

    They depend only on the width, so a row's bits do not depend on the number of rows.
    """
    block = min(WIDEST, triton.next_power_of_2(width))
    return max(1, ELEMENTS // block), block


class TritonSwiglu:
    """Kernels of swiglu on the current stream."""

    def forward(self, products: Tensor, weights: Tensor | None) -> tuple[Tensor]:
        weights = weights_as_read(weights)
        num_rows, width = products.shape[0], products.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=products.dtype, device=products.device)
        if out.numel():
            rows, block = _tile(width)
            with on_device_of(products):
                grid = (triton.cdiv(num_rows, rows), triton.cdiv(width, block))
                forward_rows[grid](products, weights, out, num_rows, width, ROWS=rows, BLOCK=block)
        return (out,)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None]:
        products, given_weights = args
        weights, grad = weights_as_read(given_weights), grads[0].contiguous()
        num_rows, width = grad.shape
        grad_products = torch.empty_like(products)
        grad_weights = None if weights is None else torch.zeros_like(weights)
        if grad.numel():
            rows, block = _tile(width)
            with on_device_of(products):
                grid = (triton.cdiv(num_rows, rows),)
                gradient_rows[grid](
                    products, weights, grad, grad_products, grad_weights, num_rows, width, ROWS=rows, BLOCK=block
                )
        return grad_products, None if grad_weights is None else grad_weights.to(given_weights.dtype)
