"""Loads the native library that setup.py built into kernels/_lib/, and says why it cannot be loaded."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.dispatch import why_not_host
from marsrl.kernels.head.objective import NUM_OPTIONS

ABI_VERSION = 16  # csrc/include/abi.h
FOLDER = Path(__file__).parent / "_lib"


class _pointer:
    """An argument that C reads as an address: a tensor, for that of its data, or what ctypes takes for a void pointer."""

    @staticmethod
    def from_param(value: Any) -> Any:
        return ctypes.c_void_p.from_param(value.data_ptr() if isinstance(value, Tensor) else value)


_int64, _float, _int = ctypes.c_int64, ctypes.c_float, ctypes.c_int

# name -> (result, arguments), in the order of the C declarations
Declarations = Mapping[str, tuple[Any, Sequence[Any]]]
_CPU_FUNCTIONS: Declarations = {
    "marsrl_row_logprobs": (
        _int64,
        [_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer, _pointer, _float, *[_pointer] * 4, _int],
    ),
    "marsrl_row_partials": (
        None,
        [_pointer, _int64, _int64, _int64, _pointer, _pointer, _pointer, _pointer, _int64, _int],
    ),
    "marsrl_exponential_gradients": (
        None,
        [
            *(_pointer, _int64, _pointer, _pointer, _pointer, _int64, _int64, _pointer, _int64, _pointer, _float),
            *([_pointer] * 7),
            *(_int64, _int),
        ],
    ),
    "marsrl_row_gradients": (
        _int64,
        [
            *(_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer, _int64, _pointer, _float),
            *([_pointer] * 7),
            _int,
        ],
    ),
    "marsrl_policy_terms": (None, [*([_pointer] * 4), _int64, _int64]),
    "marsrl_policy_rows": (
        _int64,
        [
            *(_pointer, _int64, _int64, _int64, _pointer, _int64, _pointer, _pointer, _float),
            *([_pointer] * 7),
            _int,
        ],
    ),
    "marsrl_group_advantage": (
        None,
        [_pointer, _int, _pointer, _pointer, _int64, _int, _int, ctypes.c_double, _pointer],
    ),
    "marsrl_attention_decode": (
        None,
        [*[_pointer] * 5, *[_int64] * 4, *[_pointer] * 3, _float, _int, _int],
    ),
    "marsrl_draw_tokens": (None, [*[_pointer] * 3, _int64, _int64, _pointer, _pointer, _int]),
    "marsrl_swiglu": (None, [_pointer, _int, _pointer, _int64, _int64, _pointer, _int]),
    "marsrl_swiglu_gradients": (
        None,
        [_pointer, _int, _pointer, _pointer, _int64, _int64, _pointer, _pointer, _int],
    ),
    "marsrl_rms_norm": (
        None,
        [_pointer, _int, _int64, _pointer, _int64, _int64, ctypes.c_double, _pointer, _pointer, _int],
    ),
    "marsrl_rms_norm_gradients": (
        None,
        [_pointer, _int, _int64, *[_pointer] * 3, _int64, _int64, _pointer, _pointer, _int],
    ),
    "marsrl_word_sum": (ctypes.c_uint64, [_pointer, _int64, ctypes.c_uint64]),
    "marsrl_sequence_of": (None, [_pointer, _int, _int64, _pointer]),
    "marsrl_sequence_sums": (None, [_pointer, _int, _pointer, _pointer, _int, _int64, _pointer]),
}


class Objective(ctypes.Structure):
    """struct Objective of csrc/include/policy_objective.h; options: PolicyObjective.options, in its order."""

    _fields_ = [
        ("options", _float * NUM_OPTIONS),
        ("inverse_normaliser", _float),
        ("kind", ctypes.c_int32),
        ("correction", ctypes.c_int32),
        ("kl", ctypes.c_int32),
    ]


_OF_TOKENS = (
    *("advantage", "log_ratio", "log_drift", "old_logprobs", "rollout_logprobs", "reference_logprobs", "gate"),
    *("dropped", "weight", "agent", "logprobs", "entropy", "coefficient", "entropy_coefficient", "sums"),
)


class Tokens(ctypes.Structure):
    """struct Tokens of csrc/include/policy_objective.h: addresses of packed arrays."""

    _fields_ = [(name, ctypes.c_void_p) for name in _OF_TOKENS]


def open_library(path: Path, functions: Declarations) -> ctypes.CDLL | str:
    """The library with its functions declared, or the reason why it cannot be used."""
    if not path.exists():
        return f"{path} is missing: build it with `MARSRL_BUILD=require pip install --no-build-isolation -e .`"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded: {error}"
    version = library.marsrl_abi_version()
    if version != ABI_VERSION:
        return f"{path} has interface version {version}, this package needs {ABI_VERSION}: build it again"
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def _cpu() -> ctypes.CDLL | str:
    return open_library(FOLDER / "marsrl_cpu.so", _CPU_FUNCTIONS)


def cpu_library() -> ctypes.CDLL:
    """csrc/cpu as a library; RuntimeError with the reason where it cannot be used."""
    library = _cpu()
    if isinstance(library, str):
        raise RuntimeError(f"kernels: {library}")
    return library


def why_no_cpu_library() -> str | None:
    """None where the CPU library works, else the reason."""
    library = _cpu()
    return library if isinstance(library, str) else None


def why_not_float_or_bfloat16(name: str, tensor: Tensor) -> str | None:
    """None where a function of the CPU library that knows these two dtypes can read the tensor, else the reason."""
    if (reason := why_not_host(name, tensor)) is not None or tensor.dtype in (torch.float32, torch.bfloat16):
        return reason
    return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, csrc/cpu reads float32 and bfloat16"


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lies; None stays the null pointer."""
    return None if tensor is None else tensor.data_ptr()
