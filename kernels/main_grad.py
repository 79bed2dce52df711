"""Weight gradients that a backward adds to Megatron's float32 buffers instead of returning them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.checks import check


@dataclass(frozen=True)
class MainGrad:
    """Buffer to which a backward adds a weight's gradient.

    total: the weight's main_grad, in the shape of the gradient that the op's backward would otherwise return.
    """

    weight: Tensor
    total: Tensor

    def placeholder(self) -> Tensor | None:
        """Return the weight gradient that a backward hands to autograd once the real one is in `total`.

        If the weight has Megatron's attribute `grad_added_to_main_grad`, set it and return an uninitialised tensor: Megatron's
        hooks need a tensor, but ignore its values. Otherwise return None.
        """
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        if getattr(self.weight, "zero_out_wgrad", False):  # True if another use of the weight adds a real gradient
            return self.weight.new_zeros(self.total.shape)
        return self.weight.new_empty(self.total.shape)


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add grad_output.T @ total_input to main_grad in place.

    Replaces apex's function of this name, which Megatron calls.

    total_input: [T, in]. grad_output: [T, out], in the same dtype. main_grad: [out, in] float32.

    The GEMM accumulates directly into float32. This avoids rounding the gradient to 16 bits, writing it, and reading it again in
    a kernel that adds it. 16-bit tensors need a GPU: torch 2.13 has no such GEMM for CPUs.
    """
    if total_input.dtype == torch.float32:
        main_grad.addmm_(grad_output.t(), total_input)
    else:
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=torch.float32, out=main_grad)


def check_main_grad(op: str, weight: Tensor, main_grad: Tensor) -> None:
    """Raise ValueError unless main_grad is a float32 buffer for the gradient of this weight.

    It must have the weight's shape and device, and must not be expanded.
    """
    check(op, "main_grad", main_grad, tuple(weight.shape), (torch.float32,), weight.device)
    if any(size > 1 and stride == 0 for size, stride in zip(main_grad.shape, main_grad.stride(), strict=True)):
        raise ValueError(f"{op}: main_grad is expanded, expected separate memory for each element")
