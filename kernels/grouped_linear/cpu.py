"""Grouped linear layers on the CPU: a loop of GEMMs, one per expert, that write into one output."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.main_grad import MainGrad


class CpuGroupedLinear:
    """Kernels of grouped_linear; an expert without rows costs nothing and gets gradient 0.

    Like autograd, it rounds each weight gradient to the dtype of x before adding it to main_grad.
    """

    def forward(
        self, x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None
    ) -> tuple[Tensor]:
        output = x.new_empty(x.shape[0], weights.shape[1])
        for expert, rows in _spans(tokens_per_expert):
            torch.mm(x[rows], weights[expert].t(), out=output[rows])
        return (output,)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, tokens_per_expert, main_grad = args
        grad_x = grad_weights = None
        spans = list(_spans(tokens_per_expert))
        if needs[0]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            for expert, rows in spans:
                torch.mm(grads[0][rows], weights[expert], out=grad_x[rows])
        if needs[1] and main_grad is not None:
            for expert, rows in spans:
                main_grad.total[expert].add_(torch.mm(grads[0][rows].t(), x[rows]))
            grad_weights = main_grad.placeholder()
        elif needs[1]:
            grad_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
            if len(spans) < weights.shape[0]:
                grad_weights.zero_()
            for expert, rows in spans:
                torch.mm(grads[0][rows].t(), x[rows], out=grad_weights[expert])
        return grad_x, grad_weights, None


def _spans(tokens_per_expert: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (expert, slice of the expert's rows) for each expert that has rows."""
    end = 0
    for expert, count in enumerate(tokens_per_expert.tolist()):
        end += count
        if count:
            yield expert, slice(end - count, end)
