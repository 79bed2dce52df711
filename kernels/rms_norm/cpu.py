"""RMSNorm through csrc/cpu/rms_norm.cpp, threads over rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


class CpuRmsNorm:
    """Kernels of rms_norm on the CPU; rows float32 or bfloat16."""

    def forward(self, rows: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
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
    ) -> tuple[Tensor, Tensor]:
        rows, weight, _, offset = args
        grad = grads[0].contiguous()
        num_rows, width = rows.shape
        of_rows = torch.empty(num_rows, width, dtype=rows.dtype, device="cpu")
        of_weight = torch.empty(width, dtype=torch.float32, device="cpu")
        factors = _as_read(weight, offset)
        cpu_library().marsrl_rms_norm_gradients(
            *(rows, rows.dtype == torch.bfloat16, rows.stride(0), factors, saved[0], grad, num_rows, width),
            *(of_rows, of_weight, torch.get_num_threads()),
        )
        return of_rows, of_weight.to(weight.dtype)


def _as_read(weight: Tensor, offset: float) -> Tensor:
    """[N] float32, contiguous; the weight itself where it is that."""
    if not offset and weight.dtype == torch.float32 and weight.is_contiguous():
        return weight
    return weight.detach().float().contiguous() + offset
