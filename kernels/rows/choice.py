"""The implementations of the row kernels in order of preference, and why one cannot serve."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import cuda_library, library
from .protocol import RowKernels


@dataclass(frozen=True)
class RowProvider:
    """An implementation that is loaded when it is first used.

    machine_lacks: None where this machine can run it, else the reason. why_not_device: the same for tensors on a device.
    """

    name: str
    load: Callable[[], RowKernels]
    machine_lacks: Callable[[], str | None]
    why_not_device: Callable[[torch.device], str | None]

    def why_not(self, **tensors: Tensor) -> str | None:
        """None where these arguments, named as the caller knows them, can be served; else the reason."""
        for name, tensor in tensors.items():
            reason = self.why_not_device(tensor.device)
            if reason is not None:
                return f"{name} is on {tensor.device}, {reason}"
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float64:
                return f"float64 input ({name}), the row kernels compute in float32"
        return None


def _load_cpu() -> RowKernels:
    from .cpu import CpuRowKernels

    return CpuRowKernels()


def _cpu_why_not(device: torch.device) -> str | None:
    return None if device.type == "cpu" else "csrc/cpu reads host memory"


def _load_cuda() -> RowKernels:
    from .cuda import CudaRowKernels

    return CudaRowKernels()


def _cuda_why_not(device: torch.device) -> str | None:
    return cuda_library.why_not_device(device)


ROW_PROVIDERS = (
    RowProvider("cpu", _load_cpu, library.why_no_cpu_library, _cpu_why_not),
    RowProvider("cuda", _load_cuda, cuda_library.machine_lacks_cuda, _cuda_why_not),
)
