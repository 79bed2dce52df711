"""Grouped linear layers by TransformerEngine's GroupedLinear: one cuBLAS GEMM an expert on several streams.

Not run on a GPU here; the tests call it with a module of the same interface.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.func import functional_call

from marsrl.kernels.grouped_linear.counts import Counts


def machine_lacks_transformer_engine() -> str | None:
    """None where TransformerEngine is installed and a GPU is there, else the reason."""
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    return None if find_spec("transformer_engine") is not None else "transformer_engine is not installed"


def why_not_transformer_engine(x: Tensor, weights: Tensor, counts: Counts) -> str | None:
    """None where TransformerEngine can serve these tensors, else the reason."""
    if x.device.type != "cuda":
        return f"x is on {x.device}, this one is for CUDA"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x has dtype {str(x.dtype).removeprefix('torch.')}, TransformerEngine is asked for 16-bit GEMMs alone"
    if counts.host is None:
        return "tokens_per_expert is on the GPU, TransformerEngine's GEMMs need it on the host"
    if x.shape[0] == 0:
        return "x has no rows"
    return None


@lru_cache(maxsize=16)
def _module(num_experts: int, num_in: int, num_out: int, dtype: torch.dtype) -> torch.nn.Module:
    """Its own weights hold no memory: each call brings the caller's."""
    from transformer_engine.pytorch import GroupedLinear

    return GroupedLinear(num_experts, num_in, num_out, bias=False, params_dtype=dtype, device="meta")


def grouped_linear_transformer_engine(x: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """[T, N] as the reference defines it; the gradient of `weights` is put together from those of its experts."""
    num_experts, num_out, num_in = weights.shape
    module = _module(num_experts, num_in, num_out, x.dtype)
    named = {f"weight{expert}": weight for expert, weight in enumerate(weights.contiguous().unbind())}
    return functional_call(module, named, (x.contiguous(), counts.on_host()))
