"""Low-rank adapters in vLLM: startup arguments and loading.

An adapter's name and number never change; each version has its own path. vLLM identifies cached prefixes by name and path, so
under an unchanged path it would reuse keys and values of the previous version. Each adapter has one of max_loras slots, whose
rank is the largest of all adapters'; a smaller adapter's slot is padded with zeros.

vLLM is imported only inside the functions that need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marsrl.rollout.adapter import AdapterConfig, Target, adapted
from marsrl.rollout.model_shape import ModelShape, read_shape

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

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


class LoadedAdapters:
    """Adapters that an engine serves, each with its last loaded version."""

    def __init__(self, names: Mapping[str, AdapterConfig]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._loaded: dict[str, LoRARequest] = {}

    def of(self, name: str) -> LoRARequest | None:
        """LoRARequest to attach to requests of this adapter; None before its first load: the base weights."""
        return self._loaded.get(name)

    def load(self, engine: Any, name: str, path: str) -> int:
        """Load a version into vLLM's LLMEngine, replacing the previous one. Returns the adapter's number in the workers."""
        from vllm.lora.request import LoRARequest

        number = self._numbers[name]
        # load_inplace only here: on a request, vLLM would reread the file at every step
        engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
        self._loaded[name] = LoRARequest(name, number, path)
        return number
