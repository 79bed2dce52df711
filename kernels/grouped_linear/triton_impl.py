"""Grouped linear layers on a GPU by our Triton kernels: launches, tile sizes, autograd. Nothing waits for the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.first_derivative import first_derivative_only
from marsrl.kernels.grouped_linear.counts import Counts
from marsrl.kernels.grouped_linear.triton_kernels import matrix_gradients, rows_times_matrices
from marsrl.kernels.triton_machine import on_device_of


@dataclass(frozen=True)
class Tiles:
    """A tile of the result is m by n; k is the depth of a step."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def plan_tiles(dtype: torch.dtype) -> Tiles:
    return Tiles(32, 32, 32, 4, 1) if dtype == torch.float32 else Tiles(128, 128, 64, 8, 3)


def _rows_times_matrices(x: Tensor, matrices: Tensor, ends: Tensor, tiles: Tiles) -> Tensor:
    """[T, out] from x [T, in] and matrices [E, out, in] of any strides."""
    num_experts, num_out, num_in = matrices.shape
    out = torch.empty(x.shape[0], num_out, dtype=x.dtype, device=x.device)
    num_programs = (x.shape[0] // tiles.m + num_experts) * -(-num_out // tiles.n)
    if x.shape[0] and num_programs:
        with on_device_of(x):
            rows_times_matrices[(num_programs,)](
                x, matrices, out, ends, num_experts, num_in, num_out, x.stride(0), *matrices.stride(),
                **_constants(tiles),
            )  # fmt: skip
    return out


def _matrix_gradients(x: Tensor, grad_out: Tensor, ends: Tensor, tiles: Tiles) -> Tensor:
    """[E, out, in] from x [T, in] and grad_out [T, out]."""
    num_in, num_out = x.shape[1], grad_out.shape[1]
    out = torch.empty(ends.numel(), num_out, num_in, dtype=x.dtype, device=x.device)
    num_programs = ends.numel() * -(-num_out // tiles.m) * -(-num_in // tiles.n)
    if num_programs:
        with on_device_of(x):
            matrix_gradients[(num_programs,)](
                x, grad_out, out, ends, num_in, num_out, x.stride(0), grad_out.stride(0), **_constants(tiles)
            )
    return out


class GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, ends: Tensor, tiles: Tiles) -> Tensor:
        x = _rows_contiguous(x)
        ctx.save_for_backward(x, weights, ends)
        ctx.tiles = tiles
        return _rows_times_matrices(x, weights, ends, tiles)

    @staticmethod
    @first_derivative_only("grouped_linear")
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weights, ends = ctx.saved_tensors
        grad_out = _rows_contiguous(grad_out)
        of_x = of_weights = None
        if ctx.needs_input_grad[0]:
            of_x = _rows_times_matrices(grad_out, weights.transpose(1, 2), ends, ctx.tiles)
        if ctx.needs_input_grad[1]:
            of_weights = _matrix_gradients(x, grad_out, ends, ctx.tiles)
        return of_x, of_weights, None, None


def grouped_linear_triton(x: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """[T, N] as the reference defines it."""
    return GroupedLinear.apply(x, weights, counts.ends_on(x.device), plan_tiles(x.dtype))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _constants(tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "PRECISION": "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
