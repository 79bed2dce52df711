"""Choice of norms and linear layers for a policy, and why. Imports neither megatron nor, without a GPU, more than torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

Layers = Literal["transformer_engine", "ours"]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """why: a reason for people; for ours, why not TransformerEngine's."""

    layers: Layers
    why: str


def choose_layers(wanted: Literal["auto"] | Layers = "auto") -> LayerChoice:
    """TransformerEngine's where they can be used, else ours; what is asked for by name is used or refused.

    Raises:
        ValueError: TransformerEngine is asked for and cannot be used; with the reason.
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
    import torch

    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    try:  # what megatron-core imports of it: without one of these it would go on with stand-ins
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401
    except (ImportError, OSError) as error:  # its core without its torch part; a CUDA library that is missing
        return f"transformer_engine is installed and does not import: {error}"
    return None
