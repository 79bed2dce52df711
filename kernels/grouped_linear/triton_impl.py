"""Grouped linear layers on a GPU by our Triton kernels: launches and tile sizes. The host never waits for the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.checks import rows_dense
from marsrl.kernels.grouped_linear.torch_impl import ends_on
from marsrl.kernels.grouped_linear.triton_kernels import matrix_gradients, rows_times_matrices
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.triton_machine import on_device_of


def plan_tiles(dtype: torch.dtype) -> dict[str, int]:
    """Return launch options.

    A tile of the result is BLOCK_M by BLOCK_N; a step of the loop sums BLOCK_K terms.
    """
    m, n, k, num_warps, num_stages = (32, 32, 32, 4, 1) if dtype == torch.float32 else (128, 128, 64, 8, 3)
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": num_warps, "num_stages": num_stages}


def _rows_times_matrices(x: Tensor, matrices: Tensor, ends: Tensor, tiles: dict[str, int]) -> Tensor:
    """Return [T, out], the rows of x [T, in] times their expert's transposed matrix.

    matrices: [E, out, in], with any strides.
    """
    num_experts, num_out, num_in = matrices.shape
    out = torch.empty(x.shape[0], num_out, dtype=x.dtype, device=x.device)
    num_programs = (x.shape[0] // tiles["BLOCK_M"] + num_experts) * -(-num_out // tiles["BLOCK_N"])
    if x.shape[0] and num_programs:
        with on_device_of(x):
            rows_times_matrices[(num_programs,)](
                x, matrices, out, ends, num_experts, num_in, num_out, x.stride(0), *matrices.stride(),
                **tiles,
            )  # fmt: skip
    return out


def write_matrix_gradients(out: Tensor, x: Tensor, grad_out: Tensor, ends: Tensor, adds: bool) -> None:
    """Compute grad_out.T @ x over the rows of each expert, into `out`.

    x: [T, in]. grad_out: [T, out]. out: [E, out, in], each expert's matrix contiguous. adds: add to `out` instead of overwriting.
    """
    num_in, num_out, tiles = x.shape[1], grad_out.shape[1], plan_tiles(x.dtype)
    num_programs = ends.numel() * -(-num_out // tiles["BLOCK_M"]) * -(-num_in // tiles["BLOCK_N"])
    if num_programs:
        with on_device_of(x):
            matrix_gradients[(num_programs,)](
                x,
                grad_out,
                out,
                ends,
                num_in,
                num_out,
                x.stride(0),
                grad_out.stride(0),
                out.stride(0),
                ADDS=adds,
                **tiles,
            )


class TritonGroupedLinear:
    """Kernels of grouped_linear."""

    def forward(
        self, x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None
    ) -> tuple[Tensor]:
        ends = ends_on(tokens_per_expert, x.device)
        return (_rows_times_matrices(rows_dense(x), weights, ends, plan_tiles(x.dtype)),)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, tokens_per_expert, main_grad = args
        ends, grad_out, tiles = ends_on(tokens_per_expert, x.device), rows_dense(grads[0]), plan_tiles(x.dtype)
        grad_x = grad_weights = None
        if needs[0]:
            grad_x = _rows_times_matrices(grad_out, weights.transpose(1, 2), ends, tiles)
        if needs[1] and main_grad is not None:
            write_matrix_gradients(main_grad.total, rows_dense(x), grad_out, ends, True)
            grad_weights = main_grad.placeholder()
        elif needs[1]:
            grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
            write_matrix_gradients(grad_weights, rows_dense(x), grad_out, ends, False)
        return grad_x, grad_weights, None
