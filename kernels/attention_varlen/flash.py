"""Packed attention by flash-attn 4, 3 or 2, or by PyTorch's varlen_attn, which contains the kernels of flash-attn 2.

flash-attn 4 has run on an H200 (benchmarks/results/nvidia_h200); the others are untested."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.triton_machine import machine_lacks_cuda


@dataclass(frozen=True)
class Version:
    """Version of flash-attn. The arguments that we pass have the same names in all versions.

    name: name of the implementation. module: the module that has flash_attn_varlen_func.
    generations: major compute capabilities of the GPUs on which this version's backward has a deterministic mode.
    """

    name: str
    module: str
    generations: tuple[int, ...]


FLASH_4 = Version("flash4", "flash_attn.cute.interface", (9, 10, 11))  # for Hopper and Blackwell; as of 4.0.0b36
FLASH_3 = Version("flash3", "flash_attn_interface", (9,))  # Hopper
FLASH_2 = Version("flash2", "flash_attn.flash_attn_interface", (8, 9, 10, 11, 12))
MOST_HEAD_SIZE = 256


def machine_lacks(version: Version) -> str | None:
    """Return None if this version can be imported and a GPU is there, else the reason."""
    if reason := machine_lacks_cuda():
        return reason
    if not _is_installed(version.module):
        return f"{version.module} is not installed"
    function = _function(version.module)
    return function if isinstance(function, str) else None


def why_not(version: Version, q: Tensor, *_: Any) -> str | None:
    """Return None if this version can serve these arguments, else the reason. Call it after machine_lacks."""
    reason = why_not_flash_kernels(q)
    if reason is not None:
        return reason
    major, minor = torch.cuda.get_device_capability(q.device)
    if major not in version.generations:
        generations = ", ".join(f"{generation}.x" for generation in version.generations)
        return f"the GPU has compute capability {major}.{minor}, this version of flash-attn supports {generations}"
    if version is FLASH_4 and major != 9 and 128 < q.shape[2] < MOST_HEAD_SIZE:
        return f"head size {q.shape[2]}, flash-attn on Blackwell supports up to 128, and {MOST_HEAD_SIZE}"
    return None


def attention_varlen_flash(
    version: Version,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    max_seqlen: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Return the output [T, N, D] that reference.py defines.

    Like the reference, flash-attn aligns a causal mask at the last key.
    """
    function = _function(version.module)
    assert not isinstance(function, str), function
    result = function(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens.int(),
        cu_seqlens_k=cu_seqlens_k.int(),
        max_seqlen_q=max_seqlen or q.shape[0],  # bounds of the grid; surplus blocks exit at once
        max_seqlen_k=max_seqlen or k.shape[0],
        softmax_scale=scale,
        causal=causal,
        deterministic=deterministic,
    )
    return result[0] if isinstance(result, tuple) else result  # versions 3 and 4 may return (out, lse)


def why_not_flash_kernels(q: Tensor) -> str | None:
    """Return None if flash-attn's kernels, or PyTorch's copy of them, can serve q, else the reason."""
    if q.device.type != "cuda":
        return f"q is on {q.device}, flash-attn reads CUDA memory"
    if q.shape[0] == 0:
        return "q has no tokens"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q has dtype {str(q.dtype).removeprefix('torch.')}, flash-attn supports bfloat16 and float16"
    if q.shape[2] % 8 or q.shape[2] > MOST_HEAD_SIZE:
        return f"head size {q.shape[2]}, flash-attn supports multiples of 8 up to {MOST_HEAD_SIZE}"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, flash-attn needs 8.0 or later"
    return None


@cache
def _is_installed(module: str) -> bool:
    """Return True if the module exists; its package is not imported.

    Importing flash_attn would load the CUDA library of version 2. If only version 4 is installed, flash_attn is just the folder
    around it.
    """
    top, _, submodule = module.partition(".")
    spec = find_spec(top)
    if spec is None or not submodule:
        return spec is not None
    file = submodule.replace(".", "/") + ".py"
    return any((Path(folder) / file).exists() for folder in spec.submodule_search_locations or ())


@cache
def _function(module: str) -> Callable[..., Any] | str:
    """Return the module's flash_attn_varlen_func, or the reason why there is none."""
    try:
        function: Callable[..., Any] = import_module(module).flash_attn_varlen_func
    except (ImportError, OSError, AttributeError) as error:  # a build for another torch, or a missing CUDA library
        return f"{module} is installed but cannot be imported: {error}"
    return function


def why_not_varlen_attn(q: Tensor, *others: Any) -> str | None:
    """Return None if varlen_attn supports these arguments, else the reason.

    The last argument is `deterministic`.
    """
    if others[-1] and not torch.are_deterministic_algorithms_enabled():
        return "its backward pass is deterministic only under torch.use_deterministic_algorithms(True)"
    return why_not_flash_kernels(q)


def attention_varlen_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    max_seqlen: int | None = None,
    deterministic: bool = False,  # checked by why_not_varlen_attn
) -> Tensor:
    """Return the output [T, N, D] that reference.py defines, differentiable by PyTorch's autograd."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        q,
        k,
        v,
        cu_seqlens.int(),
        cu_seqlens_k.int(),
        max_seqlen or q.shape[0],
        max_seqlen or k.shape[0],
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)  # varlen_attn returns a pair only if the log-sum-exp is requested
    return output
