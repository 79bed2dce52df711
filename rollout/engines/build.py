"""Specification and construction of one engine, in this process or in an actor's."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.config import LocalOptions, VllmOptions
from marsrl.rollout.engines.protocol import NOTHING_RECORDED, Engine, Records


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything needed to build one engine, in this process or another."""

    kind: str  # "vllm" or "local"
    model_dir: str
    dtype: str
    max_model_len: int
    seed: int
    threads: int
    device: str  # "cpu" or "cuda"
    vllm: VllmOptions
    local: LocalOptions
    sleeps: bool = False  # shares its GPU with the trainer
    records: Records = NOTHING_RECORDED
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)  # served, by name

    def environment(self) -> dict[str, str]:
        """Environment variables the serving process needs from its start."""
        if self.kind == "vllm":
            from marsrl.rollout.engines.vllm.arguments import vllm_environment

            sampler, quantises = self.vllm.sampler_on(self.device), self.vllm.quantization is not None
            return vllm_environment(self.threads, self.device, sampler, quantises=quantises)
        return {"OMP_NUM_THREADS": str(self.threads)}


def import_library(kind: str) -> None:
    """Import this kind of engine's library, in a process whose environment is set."""
    importlib.import_module("vllm.entrypoints.llm" if kind == "vllm" else "marsrl.rollout.engines.local.engine")


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine in this process, whose environment has spec.environment()."""
    if spec.kind == "vllm":
        from marsrl.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(
            spec.model_dir,
            spec.vllm,
            dtype=spec.dtype,
            max_model_len=spec.max_model_len,
            seed=spec.seed,
            threads=spec.threads,
            sleeps=spec.sleeps,
            records=spec.records,
            adapters=spec.adapters,
        )
    from marsrl.rollout.engines.local.engine import LocalEngine

    return LocalEngine(
        spec.model_dir,
        dtype=spec.dtype,
        max_model_len=spec.max_model_len,
        device=spec.device,
        max_num_seqs=spec.local.max_num_seqs,
        threads=spec.threads,
        adapters=spec.adapters,
    )
