"""Packed attention by flash-attn where it is installed: version 3 on Hopper, else version 2. Not run on a GPU here."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The module of each version: both have flash_attn_varlen_func with the same keywords for what is used here.
VERSION_3, VERSION_2 = "flash_attn_interface", "flash_attn"


def machine_lacks_flash() -> str | None:
    """None where a flash-attn can be imported and a GPU is there, else the reason."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if find_spec(VERSION_3) is None and find_spec(VERSION_2) is None:
        return f"neither {VERSION_3} (flash-attn 3) nor {VERSION_2} (flash-attn 2) is installed"
    return None


def why_not_flash(q: Tensor, *_: object) -> str | None:
    """None where flash-attn can serve these tensors, else the reason."""
    if q.device.type != "cuda":
        return f"q is on {q.device}, flash-attn reads CUDA memory"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q has dtype {str(q.dtype).removeprefix('torch.')}, flash-attn takes bfloat16 and float16"
    if q.shape[2] % 8 or q.shape[2] > 256:
        return f"head size {q.shape[2]}, flash-attn takes multiples of 8 up to 256"
    major, minor = torch.cuda.get_device_capability(q.device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, flash-attn needs 8.0"
    if _module_for(major) is None:
        return f"{VERSION_3} alone is installed, which is for Hopper; the GPU has compute capability {major}.{minor}"
    return None


def attention_varlen_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    max_seqlen: int | None = None,
) -> Tensor:
    """[T, N, D] as the reference defines it; flash-attn too aligns a causal mask at the last key."""
    module = _module_for(torch.cuda.get_device_capability(q.device)[0])
    assert module is not None, "why_not_flash was not asked"
    result = _function(module)(
        q,
        k,
        v,
        cu_seqlens.int(),
        cu_seqlens_k.int(),
        max_seqlen_q=max_seqlen or q.shape[0],  # bounds of the grid; None: blocks behind the end leave at once
        max_seqlen_k=max_seqlen or k.shape[0],
        softmax_scale=scale,
        causal=causal,
        deterministic=True,
    )
    return result[0] if isinstance(result, tuple) else result  # early versions of 3 return (out, lse)


def _module_for(major: int) -> str | None:
    if major == 9 and find_spec(VERSION_3) is not None:
        return VERSION_3
    return VERSION_2 if find_spec(VERSION_2) is not None else None


@cache
def _function(module: str) -> Callable[..., Any]:
    return import_module(module).flash_attn_varlen_func
