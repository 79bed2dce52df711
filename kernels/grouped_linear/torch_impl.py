"""Grouped linear layers by PyTorch's grouped GEMM (CUTLASS on Hopper), in bfloat16."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.dispatch import late_function
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.triton_machine import machine_lacks_triton

ALIGNMENT = 8  # bfloat16 numbers; the kernel reads 16 bytes at a time


def why_not_grouped_mm(x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None) -> str | None:
    """Return None if torch._grouped_mm can serve these tensors, forward and backward, else the reason."""
    if x.device.type != "cuda":
        return f"x is on {x.device}, this implementation is for CUDA"
    if x.dtype != torch.bfloat16:
        return f"x has dtype {str(x.dtype).removeprefix('torch.')}, torch._grouped_mm supports bfloat16"
    if x.shape[0] == 0:
        return "x has no rows"
    if x.shape[1] % ALIGNMENT or weights.shape[1] % ALIGNMENT:
        return f"K = {x.shape[1]} and N = {weights.shape[1]}, torch._grouped_mm supports multiples of {ALIGNMENT}"
    major, minor = torch.cuda.get_device_capability(x.device)
    if major < 9:
        return f"the GPU has compute capability {major}.{minor}, below 9.0 torch._grouped_mm is a slow loop that synchronises"
    if main_grad is not None and (reason := machine_lacks_triton()) is not None:
        return f"main_grad is given, which needs Triton: {reason}"
    return None


_write_matrix_gradients = late_function("grouped_linear.triton_impl", "write_matrix_gradients")


class TorchGroupedLinear:
    """Kernels of grouped_linear by torch._grouped_mm.

    Triton computes the products that are added to main_grad, because torch._grouped_mm cannot accumulate into float32.
    """

    def forward(
        self, x: Tensor, weights: Tensor, tokens_per_expert: Tensor, main_grad: MainGrad | None
    ) -> tuple[Tensor]:
        ends = ends_on(tokens_per_expert, x.device)
        return (torch._grouped_mm(x.contiguous(), weights.contiguous().transpose(1, 2), offs=ends),)

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, tokens_per_expert, main_grad = args
        x, grad_out, ends = x.contiguous(), grads[0].contiguous(), ends_on(tokens_per_expert, x.device)
        grad_x = grad_weights = None
        if needs[0]:
            grad_x = torch._grouped_mm(grad_out, weights.contiguous(), offs=ends)
        if needs[1] and main_grad is not None:
            _write_matrix_gradients(main_grad.total, x, grad_out, ends, True)
            grad_weights = main_grad.placeholder()
        elif needs[1]:
            grad_weights = torch._grouped_mm(grad_out.t(), x, offs=ends)
        return grad_x, grad_weights, None


def ends_on(tokens_per_expert: Tensor, device: torch.device) -> Tensor:
    """Return the index after each expert's last row, [E] int32 on the device.

    Counts in host memory are copied without waiting.
    """
    if device.type == "cuda" and tokens_per_expert.device.type == "cpu":
        tokens_per_expert = tokens_per_expert.pin_memory()
    return tokens_per_expert.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)
