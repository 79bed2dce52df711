"""Choice of a policy's norms and linear layers, and of Megatron's fused operations, with reasons. Imports no megatron.

    gradient accumulation   a linear layer's weight gradient goes from its GEMM straight into DDP's float32 buffer, as those of
                            our head and experts (kernels.linear_policy_loss, kernels.grouped_linear) always do
    rope                    rotation of queries and keys in one kernel; angles are gathered by position before (head.py), so that
                            the kernel needs no bounds of sequences

The router's fusion stays off: it has no place where router_replay.py could stand. Not run on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch

Layers = Literal["transformer_engine", "ours"]
APEX = "fused_weight_gradient_mlp_cuda"
_NO_GPU = "PyTorch sees no CUDA device"


class LayerChoice(NamedTuple):
    """why: a reason for people; for ours, why not TransformerEngine's."""

    layers: Layers
    why: str


def choose_layers(wanted: Literal["auto"] | Layers = "auto") -> LayerChoice:
    """TransformerEngine's where they can be used, else ours; what is asked for by name is used or refused.

    Raises ValueError: TransformerEngine is asked for and cannot be used; with the reason.
    """
    if wanted == "ours":
        return LayerChoice("ours", "policies.<name>.layers=ours")
    why_not = why_not_transformer_engine()
    if why_not is None:
        return LayerChoice("transformer_engine", "it is installed and a CUDA device is there")
    if wanted == "transformer_engine":
        raise ValueError(f"policies.<name>.layers is transformer_engine, but {why_not}; set auto or ours")
    return LayerChoice("ours", why_not)


def why_not_transformer_engine() -> str | None:
    """None where it can be used. It is imported only where a CUDA device is there."""
    if not torch.cuda.is_available():
        return _NO_GPU
    if find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    try:  # what megatron-core imports of it: without one of these it would go on with stand-ins
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401
    except (ImportError, OSError) as error:  # its core without its torch part; a CUDA library that is missing
        return f"transformer_engine is installed and does not import: {error}"
    return None


class Fusions(NamedTuple):
    """Why each is off; None: it is on."""

    gradient_accumulation: str | None
    rope: str | None


def choose_fusions(layers: LayerChoice) -> Fusions:
    """Fusions usable here with these layers."""
    ours = None if layers.layers == "transformer_engine" else "TransformerEngine's, and the layers are ours"
    # Megatron's output layer asks for apex's kernel as it is built, whoever makes the other layers.
    accumulation = why_not_on_gpu(APEX, "wgrad_gemm_accum_fp32")
    rope = ours or why_not_on_gpu("transformer_engine.pytorch.attention.rope", "apply_rotary_pos_emb")
    return Fusions(accumulation, rope)


def why_not_on_gpu(module: str, name: str) -> str | None:
    """None where a CUDA device is there and the module has the name; imported only then."""
    if not torch.cuda.is_available():
        return _NO_GPU
    try:
        getattr(import_module(module), name)
    except (ImportError, OSError, AttributeError) as error:
        return f"no {module}.{name}: {error}"
    return None
