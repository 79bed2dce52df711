"""SwiGLU through csrc/cpu/swiglu.cpp, threads over rows."""

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


class CpuSwiglu:
    """RowsOfSwiglu on the CPU; products float32 or bfloat16."""

    def forward(self, products: Tensor, weights: Tensor | None) -> Tensor:
        num_rows, width = products.shape[0], products.shape[1] // 2
        out = torch.empty(num_rows, width, dtype=products.dtype, device="cpu")
        cpu_library().marsrl_swiglu(
            products, products.dtype == torch.bfloat16, weights, num_rows, width, out, torch.get_num_threads()
        )
        return out

    def gradients(self, products: Tensor, weights: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        num_rows, width = grad.shape
        of_products = torch.empty_like(products)
        of_weights = None if weights is None else torch.empty_like(weights)
        cpu_library().marsrl_swiglu_gradients(
            *(products, products.dtype == torch.bfloat16, weights, grad, num_rows, width),
            *(of_products, of_weights, torch.get_num_threads()),
        )
        return of_products, of_weights
