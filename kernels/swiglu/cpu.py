"""SwiGLU by csrc/cpu/swiglu.cpp, parallel over rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


def weights_as_read(weights: Tensor | None) -> Tensor | None:
    """Return weights [R] as contiguous float32; None, which means 1, stays None."""
    return None if weights is None else weights.float().contiguous()


class CpuSwiglu:
    """Kernels of swiglu on the CPU; products float32 or bfloat16."""

    def forward(self, products: Tensor, weights: Tensor | None) -> tuple[Tensor]:
        weights = weights_as_read(weights)
        num_rows, width = products.shape[0], products.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=products.dtype, device="cpu")
        cpu_library().marsrl_swiglu(
            products, products.dtype == torch.bfloat16, weights, num_rows, width, out, torch.get_num_threads()
        )
        return (out,)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor | None]:
        products, given_weights = args
        weights, grad = weights_as_read(given_weights), grads[0].contiguous()
        num_rows, width = grad.shape
        grad_products = torch.empty_like(products)
        grad_weights = None if weights is None else torch.empty_like(weights)
        cpu_library().marsrl_swiglu_gradients(
            *(products, products.dtype == torch.bfloat16, weights, grad, num_rows, width),
            *(grad_products, grad_weights, torch.get_num_threads()),
        )
        return grad_products, None if grad_weights is None else grad_weights.to(given_weights.dtype)
