"""Choice of a policy's norms and linear layers, and of Megatron's fused operations, with reasons. Imports no megatron.

    gradient accumulation   a linear layer's GEMM accumulates the weight gradient in DDP's float32 buffer, by apex's kernel or
                            by torch (kernels/main_grad.py); our head and experts always do this
                            (kernels.linear_policy_loss, kernels.grouped_linear)
    rope                    rotation of queries and keys in one kernel; angles are gathered by position first (head.py), so the
                            kernel needs no bounds of sequences

The router's fusion stays off, because it has no hook for router_replay.py. Not run on a GPU.

This module also checks whether DeepEP can exchange experts' tokens (experts.py).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

from marsrl.kernels.main_grad import wgrad_gemm_accum_fp32

Layers = Literal["transformer_engine", "ours"]
APEX = "fused_weight_gradient_mlp_cuda"
PADS_HYBRIDEP = "moe_hybridep_pad_uneven_dispatch_inputs"
_NO_GPU = "PyTorch sees no CUDA device"


class LayerChoice(NamedTuple):
    """Chosen layers. why: the reason as text; for our layers, why TransformerEngine's are not used."""

    layers: Layers
    why: str


def choose_layers(wanted: Literal["auto"] | Layers = "auto") -> LayerChoice:
    """Choose our layers unless TransformerEngine's are requested by name, because those were not tested on GPUs.

    Raises ValueError with the reason if TransformerEngine is requested but cannot be used.
    """
    if wanted == "ours":
        return LayerChoice("ours", "policies.<name>.layers=ours")
    why_not = why_not_transformer_engine()
    if wanted == "auto":
        by_name = "policies.<name>.layers=transformer_engine would use it; not tested on GPUs"
        return LayerChoice("ours", why_not or by_name)
    if why_not is not None:
        raise ValueError(f"policies.<name>.layers is transformer_engine, but {why_not}; set auto or ours")
    return LayerChoice("transformer_engine", "policies.<name>.layers=transformer_engine")


def why_not_transformer_engine() -> str | None:
    """Return why TransformerEngine cannot be used; None if it can. Imports it only if there is a CUDA device."""
    if not torch.cuda.is_available():
        return _NO_GPU
    if find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    try:  # megatron-core imports these; if one is missing it silently uses stand-ins.
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401
    except (ImportError, OSError) as error:  # The torch part or a CUDA library may be missing.
        return f"transformer_engine is installed but cannot be imported: {error}"
    return None


def why_not_dispatcher(wanted: str, num_ranks: int) -> str | None:
    """Return why this machine cannot exchange tokens by policies.<name>.dispatcher; None if it can.

    num_ranks: ranks that hold a layer's experts together.
    """
    if wanted == "alltoall":
        return None
    reason = why_not_on_gpu("deep_ep", "Buffer" if wanted == "deepep" else "HybridEPBuffer")
    if reason is not None:
        return reason
    if wanted == "hybridep":
        found = version("megatron-core")
        is_old = tuple(map(int, found.split(".")[:2])) < (0, 19)
        return f"megatron-core {found} does not pad ranks to equal numbers of tokens, as 0.19 does" if is_old else None
    try:
        import_module("deep_ep").Buffer.get_dispatch_config(num_ranks)
    except AssertionError as error:
        return f"DeepEP has no settings for the {num_ranks} ranks of layout.expert x layout.expert_tensor ({error})"
    return None


class Fusions(NamedTuple):
    """Reason why each fusion is off; None if it is on."""

    gradient_accumulation: str | None
    rope: str | None


def choose_fusions(layers: LayerChoice) -> Fusions:
    """Return the fusions that can be used here with these layers."""
    ours = None if layers.layers == "transformer_engine" else "it needs TransformerEngine's layers"
    accumulation = why_not_on_gpu(APEX, "wgrad_gemm_accum_fp32")
    if accumulation is not None and torch.cuda.is_available():
        accumulation = why_not_added()
    rope = ours or why_not_on_gpu("transformer_engine.pytorch.attention.rope", "apply_rotary_pos_emb")
    return Fusions(accumulation, rope)


def why_not_added() -> str | None:
    """Return why the GPU cannot add bfloat16 products to a float32 buffer, by trying an exact sum; None if it can."""
    try:
        rows = torch.ones(16, 8, dtype=torch.bfloat16, device="cuda")
        total = torch.ones(8, 8, dtype=torch.float32, device="cuda")
        wgrad_gemm_accum_fp32(rows, rows, total)
    except (RuntimeError, TypeError, AssertionError) as error:  # A build of torch without CUDA raises AssertionError.
        return f"torch.addmm cannot add bfloat16 products to float32 here: {error}"
    return None if bool((total == 17).all()) else "torch.addmm adds bfloat16 products to float32 wrongly here"


def why_not_on_gpu(module: str, name: str) -> str | None:
    """Return why module.name cannot be used; None if there is a CUDA device and the module has that attribute."""
    if not torch.cuda.is_available():
        return _NO_GPU
    try:
        getattr(import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        return f"no {module}.{name}: {error}"
    return None
