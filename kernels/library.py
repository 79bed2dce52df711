"""Loader of the native library, which setup.py builds into kernels/_lib/."""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.dispatch import why_not_host
from marsrl.kernels.head.objective import NUM_OPTIONS

ABI_VERSION = 19  # csrc/include/abi.h
FOLDER = Path(__file__).parent / "_lib"


class _pointer:
    """ctypes type of a `void*` argument: a tensor, or whatever ctypes.c_void_p accepts."""

    @staticmethod
    def from_param(value: Any) -> Any:
        return ctypes.c_void_p.from_param(value.data_ptr() if isinstance(value, Tensor) else value)


_TYPES = {
    "p": _pointer,
    "q": ctypes.c_int64,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "Q": ctypes.c_uint64,
    "": None,
}
"""ctypes type by letter: the letters of the struct module, and p for an address."""

# Name of a C function -> (type of the result, types of the arguments), in letters of _TYPES.
Declarations = Mapping[str, tuple[str, str]]
_CPU_FUNCTIONS: Declarations = {
    "marsrl_row_logprobs": ("q", "pqqqpqppfppppi"),
    "marsrl_row_partials": ("", "pqqqppppqi"),
    "marsrl_exponential_gradients": ("", "pqpppqqpqpfpppppppqi"),
    "marsrl_row_gradients": ("q", "pqqqpqpqpfpppppppi"),
    "marsrl_policy_terms": ("", "ppppqq"),
    "marsrl_policy_rows": ("q", "pqqqpqppfpppppppi"),
    "marsrl_group_advantage": ("", "pppippqiidp"),
    "marsrl_attention_decode": ("", "pppppqqqqpppfii"),
    "marsrl_draw_tokens": ("", "pppqqppi"),
    "marsrl_swiglu": ("", "pipqqpi"),
    "marsrl_swiglu_gradients": ("", "pippqqppi"),
    "marsrl_rms_norm": ("", "piqpqqdppi"),
    "marsrl_rms_norm_gradients": ("", "piqpppqqppi"),
    "marsrl_word_sum": ("Q", "pqqQQ"),
    "marsrl_sequence_of": ("", "piqp"),
    "marsrl_sequence_sums": ("", "pippiqp"),
}


class Objective(ctypes.Structure):
    """Struct Objective of csrc/include/policy_objective.h.

    options: the numbers of PolicyObjective.options.
    """

    _fields_ = [
        ("options", ctypes.c_float * NUM_OPTIONS),
        ("inverse_normaliser", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("correction", ctypes.c_int32),
        ("kl", ctypes.c_int32),
    ]


_OF_TOKENS = (
    *("advantage", "log_ratio", "log_drift", "old_logprobs", "rollout_logprobs", "reference_logprobs", "gate"),
    *("dropped", "weight", "agent", "logprobs", "entropy", "coefficient", "entropy_coefficient", "sums"),
)


class Tokens(ctypes.Structure):
    """Struct Tokens of csrc/include/policy_objective.h: addresses of packed arrays."""

    _fields_ = [(name, ctypes.c_void_p) for name in _OF_TOKENS]


def open_library(path: Path, functions: Declarations) -> ctypes.CDLL | str:
    """Load a library and declare its functions; return it, or the reason why it cannot be used."""
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
        function.restype, function.argtypes = _TYPES[result], [_TYPES[letter] for letter in arguments]
    return library


@cache
def _cpu() -> ctypes.CDLL | str:
    return open_library(FOLDER / "marsrl_cpu.so", _CPU_FUNCTIONS)


def cpu_library() -> ctypes.CDLL:
    """Return the library built from csrc/cpu. Raises RuntimeError with the reason if it cannot be used."""
    library = _cpu()
    if isinstance(library, str):
        raise RuntimeError(f"kernels: {library}")
    return library


def why_no_cpu_library() -> str | None:
    """Return None if the CPU library works, else the reason."""
    library = _cpu()
    return library if isinstance(library, str) else None


def why_not_float_or_bfloat16(name: str, tensor: Tensor) -> str | None:
    """Return None if csrc/cpu can read the tensor, as float32 or bfloat16 in host memory, else the reason."""
    if (reason := why_not_host(name, tensor)) is not None or tensor.dtype in (torch.float32, torch.bfloat16):
        return reason
    return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, csrc/cpu reads float32 and bfloat16"


def address(tensor: Tensor | None) -> int | None:
    """Return the tensor's data pointer; without a tensor None, which ctypes passes as a null pointer."""
    return None if tensor is None else tensor.data_ptr()
