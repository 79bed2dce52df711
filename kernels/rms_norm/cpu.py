"""RMSNorm by csrc/cpu/rms_norm.cpp, parallel over rows. PyTorch rotates the float32 result, which is then rounded once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library
from marsrl.kernels.rms_norm.reference import rotated


class CpuRmsNorm:
    """Kernels of rms_norm on the CPU; rows float32 or bfloat16."""

    def forward(
        self, rows: Tensor, weight: Tensor, rotation: Tensor | None, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        if rotation is not None:
            out, scales = self.forward(rows.float(), weight, None, eps, offset)
            return rotated(out, rotation).to(rows.dtype), scales
        num_rows, width = rows.shape
        out = torch.empty(num_rows, width, dtype=rows.dtype, device="cpu")
        scales = torch.empty(num_rows, dtype=torch.float32, device="cpu")
        factors = _as_read(weight, offset)
        cpu_library().marsrl_rms_norm(
            *(rows, rows.dtype == torch.bfloat16, rows.stride(0), factors, num_rows, width, eps, out, scales),
            torch.get_num_threads(),
        )
        return out, scales

    def backward(
        self, args: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor, Tensor, None]:
        rows, weight, rotation, eps, offset = args
        grad = grads[0].contiguous()
        if rotation is not None:
            unrotated = (rotated(grad.float(), rotation, is_back=True),)
            grad_rows, grad_weight, _ = self.backward(
                (rows.float(), weight, None, eps, offset), saved, unrotated, needs
            )
            return grad_rows.to(rows.dtype), grad_weight, None
        num_rows, width = rows.shape
        grad_rows = torch.empty(num_rows, width, dtype=rows.dtype, device="cpu")
        grad_weight = torch.empty(width, dtype=torch.float32, device="cpu")
        factors = _as_read(weight, offset)
        cpu_library().marsrl_rms_norm_gradients(
            *(rows, rows.dtype == torch.bfloat16, rows.stride(0), factors, saved[0], grad, num_rows, width),
            *(grad_rows, grad_weight, torch.get_num_threads()),
        )
        return grad_rows, grad_weight.to(weight.dtype), None


def _as_read(weight: Tensor, offset: float) -> Tensor:
    """Return weight + offset as [N] float32, contiguous; the weight itself if nothing has to change."""
    if not offset and weight.dtype == torch.float32 and weight.is_contiguous():
        return weight
    return weight.detach().float().contiguous() + offset
