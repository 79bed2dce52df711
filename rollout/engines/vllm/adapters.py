"""Low-rank adapters in vLLM: the arguments that it starts with, and what it is told of each.

An adapter keeps its name and number for good; each version has a path of its own. vLLM knows cached prefixes by name and path,
so that under the same path keys and values of the version before would be used on. It keeps an adapter in a slot of its own,
of max_loras; its rank is the largest of all, and what an adapter leaves over of it is 0.

vLLM is imported by the functions that need it.
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
"""Ranks of a slot that vLLM 0.32 has kernels for."""

_MODULES: dict[Target, tuple[str, ...]] = {
    "attention": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
    "experts": ("experts",),
}


def lora_arguments(model_dir: str | Path, adapters: Mapping[str, AdapterConfig]) -> dict[str, Any]:
    """Arguments of vLLM's LLM for these adapters of a model; none without any.

    lora_target_modules is always said: else vLLM makes slots for all modules, those of experts among them.
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
    """Rank of every slot of an engine that serves these adapters: the largest of theirs, rounded up to one of RANKS."""
    largest = max(rank for each in adapters for _, _, rank in adapted(replace(shape, num_layers=1), each).values())
    return next(rank for rank in RANKS if rank >= largest)


class LoadedAdapters:
    """Adapters of one engine: which it serves, and what was loaded of each last."""

    def __init__(self, names: Mapping[str, AdapterConfig]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._loaded: dict[str, LoRARequest] = {}

    def of(self, name: str) -> LoRARequest | None:
        """vLLM's tag of requests for this adapter; None before its first load, when it is the bare weights."""
        return self._loaded.get(name)

    def load(self, engine: Any, name: str, path: str) -> int:
        """Have vLLM's LLMEngine read it, in place of what it holds under this name; the number that workers know it by."""
        from vllm.lora.request import LoRARequest

        number = self._numbers[name]
        # in place here only: on a request it would be read from its file at every step
        engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
        self._loaded[name] = LoRARequest(name, number, path)
        return number
