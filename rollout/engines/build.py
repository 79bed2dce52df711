"""Construction of one engine, in this process or in an actor's."""

from __future__ import annotations

import importlib

from marsrl.rollout.engines.protocol import Engine, EngineSpec


def environment_of(spec: EngineSpec) -> dict[str, str]:
    """Return the environment variables with which the serving process must start."""
    if spec.kind == "vllm":
        from marsrl.rollout.engines.vllm.arguments import vllm_environment

        sampler, quantises = spec.vllm.sampler_on(spec.device), spec.vllm.quantization is not None
        return vllm_environment(spec.threads, spec.device, sampler, quantises=quantises)
    return {"OMP_NUM_THREADS": str(spec.threads)}


def import_library(kind: str) -> None:
    """Import the library of this kind of engine, in a process whose environment is set."""
    importlib.import_module("vllm.entrypoints.llm" if kind == "vllm" else "marsrl.rollout.engines.local.engine")


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine in this process, whose environment has environment_of(spec)."""
    if spec.kind == "vllm":
        from marsrl.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(spec)
    from marsrl.rollout.engines.local.engine import LocalEngine

    return LocalEngine(spec)
