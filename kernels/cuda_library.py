"""csrc/cuda as a library: it loads on any machine, and a call on one without a driver says what lacks."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.library import FOLDER, Declarations, open_library
from marsrl.kernels.triton_machine import on_device_of

_pointer, _int64, _float, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int

# As in library.py. A function that queues kernels takes the stream last and returns a cudaError_t.
_CUDA_FUNCTIONS: Declarations = {
    "marsrl_cuda_device_count": (_int, [_pointer]),
    "marsrl_cuda_error_name": (ctypes.c_char_p, [_int]),
    "marsrl_cuda_error_text": (ctypes.c_char_p, [_int]),
    "marsrl_cuda_row_logprobs": (
        _int,
        [_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer, _pointer, _float, *[_pointer] * 5],
    ),
    "marsrl_cuda_row_partials": (_int, [_pointer, _int64, _int64, _int64, *[_pointer] * 4]),
    "marsrl_cuda_active_scratch": (_int64, [_int64]),
    "marsrl_cuda_active_rows": (_int, [_int64, _pointer, _int64, *[_pointer] * 7]),
    "marsrl_cuda_row_gradients": (
        _int,
        [
            *[_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer, _int64, _pointer, _float],
            *[_pointer] * 8,
            *[_int64, _int64, _int, _pointer],
        ],
    ),
    "marsrl_cuda_policy_scratch": (_int64, [_int64, _int64]),
    "marsrl_cuda_policy_terms": (
        _int,
        [_pointer, _pointer, _pointer, _pointer, _pointer, _int64, _int64, _int64, _pointer, _pointer],
    ),
}


@cache
def _cuda() -> ctypes.CDLL | str:
    return open_library(FOLDER / "marsrl_cuda.so", _CUDA_FUNCTIONS)


def cuda_library() -> ctypes.CDLL:
    """csrc/cuda as a library, on a machine without a driver too; RuntimeError with the reason where it cannot load."""
    library = _cuda()
    if isinstance(library, str):
        raise RuntimeError(f"kernels: {library}")
    return library


def machine_lacks_cuda() -> str | None:
    """None where csrc/cuda can run, else the reason: no library, no driver or no device."""
    library = _cuda()
    return library if isinstance(library, str) else _why_no_device()


@cache
def _why_no_device() -> str | None:
    library = cuda_library()
    count = ctypes.c_int32()
    error = library.marsrl_cuda_device_count(ctypes.byref(count))
    if error:
        return f"no CUDA device can be used: {describe(error)}"
    if not torch.cuda.is_available():
        return "the driver offers a CUDA device and PyTorch sees none: it is a build without CUDA"
    return None


def why_not_cuda(name: str, tensor: Tensor) -> str | None:
    """None where csrc/cuda can read this tensor, else the reason."""
    return None if _can_read(tensor) else f"{name} is on {tensor.device}, csrc/cuda reads CUDA memory"


def _can_read(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def queue(function: str, tensor: Tensor, *arguments: Any) -> None:
    """Call marsrl_cuda_<function> on the current stream of the tensor's device.

    Raises:
        RuntimeError: the kernels could not be launched; with the name, number and text of CUDA's error.
    """
    library = cuda_library()
    with on_device_of(tensor):
        error = getattr(library, f"marsrl_cuda_{function}")(*arguments, stream_of(tensor))
    if error:
        raise RuntimeError(f"csrc/cuda: {function} could not be launched: {describe(error)}")


def stream_of(tensor: Tensor) -> int:
    """The current stream of the tensor's device, as CUDA's own handle."""
    return torch.cuda.current_stream(tensor.device).cuda_stream


def describe(error: int) -> str:
    """CUDA's name, number and text of an error; for a missing driver also what to do."""
    library = cuda_library()
    name, text = library.marsrl_cuda_error_name(error).decode(), library.marsrl_cuda_error_text(error).decode()
    advice = "; install an NVIDIA driver that supports CUDA 13" if name == "cudaErrorInsufficientDriver" else ""
    return f"{name} ({error}): {text}{advice}"
