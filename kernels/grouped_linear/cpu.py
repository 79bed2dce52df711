"""A linear layer per group of rows as a loop of GEMMs that write into one output."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.first_derivative import first_derivative_only
from marsrl.kernels.grouped_linear.counts import Counts


class GroupedLinear(torch.autograd.Function):
    """One node of the graph for all experts; an expert without rows costs nothing and gets gradient 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.spans = [
            (expert, slice(end - count, end))
            for expert, (count, end) in enumerate(zip(counts, accumulate(counts)))
            if count
        ]
        output = x.new_empty(x.shape[0], weights.shape[1])
        for expert, rows in ctx.spans:
            torch.mm(x[rows], weights[expert].t(), out=output[rows])
        return output

    @staticmethod
    @first_derivative_only("grouped_linear")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        of_x = of_weights = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for expert, rows in ctx.spans:
                torch.mm(grad_output[rows], weights[expert], out=of_x[rows])
        if ctx.needs_input_grad[1]:
            has_rows = len(ctx.spans) == weights.shape[0]
            of_weights = (
                torch.empty_like(weights, memory_format=torch.contiguous_format)
                if has_rows
                else weights.new_zeros(weights.shape)
            )
            for expert, rows in ctx.spans:
                torch.mm(grad_output[rows].t(), x[rows], out=of_weights[expert])
        return of_x, of_weights, None


def grouped_linear_cpu(x: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """[T, N] as the reference defines it."""
    return GroupedLinear.apply(x, weights, counts.on_host())
