"""Environment and arguments of vLLM, set by marsrl or the user (rollout.vllm.extra), and a description of the sampler.

vLLM is imported only to check the user's arguments.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from marsrl.rollout.adapter import AdapterConfig, Target, adapted
from marsrl.rollout.config import Sampler, VllmOptions, problems_of
from marsrl.rollout.engines.protocol import EngineSpec, Records
from marsrl.rollout.engines.vllm.requests import SEATS
from marsrl.rollout.model_shape import ModelShape, read_shape

_BLOCK_CPU = 32  # tokens of a KV block: CPU kernels need a multiple of 32; larger blocks would miss short prefixes
_KV_CACHE_CPU_MIB = 256
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of LoRA slots for which vLLM 0.32 has kernels
_MODULES: dict[Target, tuple[str, ...]] = {
    "attention": ("qkv_proj", "o_proj"),
    "mlp": ("gate_up_proj", "down_proj"),
    "experts": ("experts",),
}

OWN_ARGUMENTS = {
    "model": "policies.<name>.model",
    "tokenizer": "policies.<name>.model",
    "dtype": "rollout.vllm.dtype",
    "max_model_len": "agents.<name>.max_input_tokens and max_response_tokens",
    "max_num_seqs": "rollout.vllm.max_num_seqs",
    "kv_cache_memory_bytes": "rollout.vllm.kv_cache_mib",
    "kv_cache_dtype": "rollout.vllm.kv_cache_dtype",
    "quantization": "rollout.vllm.quantization",
    "quantization_config": "rollout.vllm.quantization",
    "gpu_memory_utilization": "rollout.vllm.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.vllm.tensor_parallel",
    "enable_expert_parallel": "rollout.vllm.expert_parallel",
    "distributed_executor_backend": "rollout.vllm.tensor_parallel",
    "enable_sleep_mode": "rollout.placement",
    "logits_processors": "rollout.vllm.sampler",
    "logprobs_mode": "rollout.vllm.sampler",
    "async_scheduling": "rollout.vllm.sampler",
    "speculative_config": "rollout.vllm.draft_tokens",
    "return_sampling_mask": "loss.truncation",
    "enable_return_routed_experts": "trainer.router_replay",
    "enable_lora": "policies.<name>.adapter",
    "max_loras": "policies.<name>.adapter",
    "max_lora_rank": "policies.<name>.adapter.rank",
    "lora_target_modules": "policies.<name>.adapter.targets",
    "max_cpu_loras": None,
    "lora_dtype": None,
    "fully_sharded_loras": None,
    "enable_moe_shared_loras": None,
    "enable_mixed_moe_lora_format": None,
    "config_format": None,
    "skip_tokenizer_init": None,
    "generation_config": None,
    "disable_log_stats": None,
    "enable_prefix_caching": None,
    "worker_extension_cls": None,
    "moe_backend": None,
    "block_size": None,
}
"""{field of vLLM's EngineArgs that marsrl sets: the marsrl setting for it; None: not configurable}."""


def vllm_environment(
    threads: int | None = None, device: str = "cpu", sampler: Sampler = "marsrl", *, quantises: bool = False
) -> dict[str, str]:
    """Return environment variables for a VllmEngine on "cpu" or "cuda": vLLM's core in-process, no network, no telemetry.

    quantises: True if vLLM rounds weights to FP8. The user's VLLM_LOGGING_LEVEL is kept.
    """
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR" if device == "cpu" else "WARNING"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # fork would copy this process's locks and process groups
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # engines share the cores with the trainer
        environment["TORCHDYNAMO_DISABLE"] = "1"  # CPU engines run eagerly anyway
    else:
        # Set explicitly, so that vLLM never falls back silently. V2 rejects DrawTokens, a V1 logits processor.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if sampler == "engine" else "0"
        # No request would use FlashInfer's sampler: DrawTokens draws by itself, and V2 does not use it for draws that return
        # log-probs of the truncated distribution. But V1's warm-up would compile its kernel with nvcc.
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if quantises:
            # DeepGEMM would round scales to powers of two, and then round weights again.
            environment["VLLM_USE_DEEP_GEMM"] = "0"
            # Makes scales exact to the last bit (worker_fp8.quantised).
            environment["TORCHINDUCTOR_EMULATE_DIVISION_ROUNDING"] = "1"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return arguments of vLLM's LLM (and its EngineArgs).

    Raises ValueError: spec.vllm.extra has a name that vLLM does not know or that marsrl sets.
    """
    options, is_cpu = spec.vllm, spec.device == "cpu"
    arguments = {
        "model": spec.model_dir,
        # Like the trainer, ignore params.json and consolidated.safetensors, which Mistral models also contain.
        "config_format": "hf",
        "load_format": "hf",  # options.extra may override it
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": options.max_num_seqs + (SEATS if spec.adapters else 0),
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": "fp8_per_block" if options.quantization else None,
        "quantization_config": {"ignore": ["*.mlp.gate"]}
        if options.quantization
        else None,  # routers are not quantised
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # ignore the checkpoint's suggested sampling
        "disable_log_stats": True,
        "tensor_parallel_size": options.tensor_parallel,
        "enable_expert_parallel": options.expert_parallel,
        # Otherwise vLLM would choose Ray inside an actor with a placement group.
        "distributed_executor_backend": "uni" if options.tensor_parallel == 1 else "mp",
        "enable_sleep_mode": spec.sleeps,
        "enable_prefix_caching": True,
        "worker_extension_cls": "marsrl.rollout.engines.vllm.worker.WorkerExtension",
        "enforce_eager": is_cpu,  # options.extra may override it
        **_sampler_arguments(options.sampler_on(spec.device), spec.device, spec.records),
        **lora_arguments(spec.model_dir, spec.adapters),
    }
    if options.draft_tokens:
        # Model Runner V2 runs n-grams on the GPU under either name, but "ngram" turns off async scheduling.
        method = {"method": "eagle3", "model": options.draft_model} if options.draft_model else {"method": "ngram_gpu"}
        arguments["speculative_config"] = {**method, "num_speculative_tokens": options.draft_tokens}
    if is_cpu:
        arguments["block_size"] = _BLOCK_CPU
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        arguments["moe_backend"] = "triton"  # keeps experts in the plain layout, so checksums are comparable
    if kv_cache_mib := options.kv_cache_mib or (_KV_CACHE_CPU_MIB if is_cpu else None):
        arguments["kv_cache_memory_bytes"] = kv_cache_mib << 20
    return arguments | checked_extra(options.extra)


def _sampler_arguments(sampler: Sampler, device: str, records: Records) -> dict[str, Any]:
    if sampler == "marsrl":
        arguments: dict[str, Any] = {"logits_processors": ["marsrl.rollout.engines.vllm.sampling:DrawTokens"]}
        if device == "cuda":
            # Off, as on CPUs, where DrawTokens is tested. V1 would wait for a logits processor's tokens anyway.
            arguments["async_scheduling"] = False
        return arguments
    arguments = {"logprobs_mode": "processed_logprobs"}  # log-probs of the truncated distribution
    if records.kept_tokens:
        arguments["return_sampling_mask"] = True
    if records.experts:
        arguments["enable_return_routed_experts"] = True
    return arguments


def lora_arguments(model_dir: str | Path, adapters: Mapping[str, AdapterConfig]) -> dict[str, Any]:
    """Return arguments of vLLM's LLM for these adapters of a model; empty without adapters.

    Each adapter has one of max_loras slots. All slots have the rank of the largest adapter; smaller ones are padded with zeros.
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
    """Return the slot rank for these adapters: the largest rank in their files, rounded up to one of _RANKS.

    adapter_config.json also lists experts' gate and up as one matrix of twice the rank (adapter.write_adapter), which vLLM
    counts.
    """
    shape = dataclasses.replace(shape, num_layers=1)
    ranks = {
        2 * rank if ".experts." in name else rank for a in adapters for name, (_, _, rank) in adapted(shape, a).items()
    }
    return next((rank for rank in _RANKS if rank >= max(ranks)), _RANKS[-1])


def checked_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Validate rollout.vllm.extra against the installed vLLM's EngineArgs.

    Raises ValueError: unknown field, invalid value, or a field that marsrl sets.
    """
    if not extra:
        return {}
    for name in extra:
        if name in OWN_ARGUMENTS:
            key = OWN_ARGUMENTS[name]
            near = f"set {key} instead" if key else "marsrl depends on its value; remove it"
            raise ValueError(f"rollout.vllm.extra.{name} is an argument that marsrl sets itself; {near}")
    from vllm.engine.arg_utils import EngineArgs

    types, checked = {each.name: each.type for each in dataclasses.fields(EngineArgs)}, {}
    for name, value in extra.items():
        if name not in types:
            near = ", ".join(difflib.get_close_matches(name, types.keys() - OWN_ARGUMENTS.keys(), 3))
            raise ValueError(
                f"rollout.vllm.extra.{name} is not a field of this vLLM's EngineArgs"
                f"{f'; similar ones: {near}' if near else '; see its documentation'}"
            )
        try:
            checked[name] = _adapter(types[name]).validate_python(value)
        except ValidationError as error:
            raise ValueError(
                f"rollout.vllm.extra.{name} is {value!r}, which vLLM's EngineArgs rejects ({problems_of(error)}); correct or "
                "remove it"
            ) from error
    return checked


def _adapter(field_type: Any) -> TypeAdapter[Any]:
    """Build a validator of a type. It accepts all values of types that pydantic does not know (two fields); vLLM checks these."""
    try:
        return TypeAdapter(Any if isinstance(field_type, str) else field_type)
    except PydanticSchemaGenerationError:
        return TypeAdapter(Any)


def who_draws(options: VllmOptions, device: str) -> str:
    """Describe an engine's sampler and model runner in one line."""
    if options.sampler_on(device) == "marsrl":
        return f"marsrl draws tokens (repeats bitwise), on vLLM's Model Runner V1{_is_eager(options, device)}"
    runner = "V2, with async scheduling" if device == "cuda" else "V1"
    drafts = f", after drafts of {options.draft_tokens}" if options.draft_tokens else ""
    drafts += " by draft_model" if options.draft_model else ""
    return f"vLLM's own sampler draws tokens{drafts}, on its Model Runner {runner}{_is_eager(options, device)}"


def _is_eager(options: VllmOptions, device: str) -> str:
    if options.extra.get("enforce_eager", device == "cpu"):
        return ", eager"
    return ", compiled" + (" and in CUDA graphs" if device == "cuda" else "")
