"""vLLM's startup arguments for low-rank adapters.

Each adapter has one of max_loras slots, whose rank is the largest of all adapters'; a smaller adapter's slot is padded with
zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from marsrl.rollout.adapter import AdapterConfig, Target, adapted
from marsrl.rollout.model_shape import ModelShape, read_shape

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Slot ranks for which vLLM 0.32 has kernels."""

_MODULES: dict[Target, tuple[str, ...]] = {
    "attention": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
    "experts": ("experts",),
}


def lora_arguments(model_dir: str | Path, adapters: Mapping[str, AdapterConfig]) -> dict[str, Any]:
    """Arguments of vLLM's LLM for these adapters of a model; empty without adapters.

    lora_target_modules is always set: by default vLLM creates slots for all modules, including experts.
    """
    if not adapters:
        return {}
    shape = read_shape(model_dir)
    targets = {target for each in adapters.values() for target in each.targets}
    targets -= {"mlp"} if shape.num_experts else {"experts"}
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": slot_rank(shape, adapters.values()),
        "lora_target_modules": [module for target, own in _MODULES.items() if target in targets for module in own],
    }


def slot_rank(shape: ModelShape, adapters: Iterable[AdapterConfig]) -> int:
    """Slot rank of an engine that serves these adapters: their largest rank, rounded up to one of RANKS."""
    largest = max(rank for each in adapters for _, _, rank in adapted(replace(shape, num_layers=1), each).values())
    return next(rank for rank in RANKS if rank >= largest)
