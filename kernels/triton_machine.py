"""Conditions for Triton kernels: a CUDA device, or TRITON_INTERPRET=1 at the start of the process.

This module does not import Triton: an op imports its kernels when it first runs them.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from marsrl.kernels.checks import why_not_double


@cache  # Triton reads TRITON_INTERPRET when a kernel is defined, so a later change has no effect
def is_interpreted() -> bool:
    """Return True if Triton interprets kernels with NumPy on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def machine_lacks_cuda() -> str | None:
    """Return None if PyTorch sees a GPU, else the reason; for Implementation.machine_lacks."""
    return None if torch.cuda.is_available() else "PyTorch sees no CUDA device"


def machine_lacks_triton() -> str | None:
    """Return None if this machine can run Triton kernels, else the reason."""
    reason = None if is_interpreted() else machine_lacks_cuda()
    return reason and f"{reason} (TRITON_INTERPRET=1 runs Triton kernels on the CPU, for tests)"


def why_not_triton(name: str, tensor: Tensor) -> str | None:
    """Return None if Triton kernels can read this tensor, else the reason."""
    if tensor.device.type == "cuda" or (tensor.device.type == "cpu" and is_interpreted()):
        return None
    return f"{name} is on {tensor.device}, Triton kernels read CUDA memory"


def why_not_triton_float32(name: str, tensor: Tensor) -> str | None:
    """Return None if Triton kernels that compute in float32 can read this tensor, else the reason."""
    return why_not_double(name, tensor) or why_not_triton(name, tensor)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current device, on which Triton launches kernels."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


MULTIPROCESSORS = 132  # as on an H100 or H200


def num_multiprocessors(tensor: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's device; for CPU tensors, that of an H100."""
    if not tensor.is_cuda:
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
