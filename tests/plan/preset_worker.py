"""Check every file of configs/ as far as possible without a GPU: `python preset_worker.py FOLDER`, JSON to stdout.

The process makes PyTorch and vLLM see eight H100s, which cannot be undone, so it is a process of its own. It starts no engine
and reads no weights. It calls real code: our preflight, and vLLM's EngineArgs.create_engine_config().
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import torch

num_gpus = 8

DRAFT = {  # EAGLE-3 for Qwen3-30B-A3B
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 2048, "vocab_size": 151_936,
    "draft_vocab_size": 32_000, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 12_288, "max_position_embeddings": 2048,
}  # fmt: skip

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132, major=9, minor=0
)


def pretend_cuda() -> None:
    """Make torch.cuda look like a node of H100s."""
    cuda: Any = torch.cuda
    accelerator: Any = torch.accelerator
    cuda.is_available = lambda: True
    cuda.device_count = cuda._device_count_nvml = accelerator.device_count = lambda: num_gpus
    cuda.get_device_capability = lambda *words, **options: (9, 0)
    cuda.get_device_name = lambda *words, **options: H100.name
    cuda.get_device_properties = lambda *words, **options: H100


def pretend_vllm_on_cuda() -> None:
    """Use vLLM's CUDA platform in place of the CPU's; compiled modules that the CPU wheel lacks are empty."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(name))
    for name in ("_vllm_fa2_C", "_vllm_fa3_C"):
        sys.modules.setdefault(f"vllm.vllm_flash_attn.{name}", types.ModuleType(name))
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    NonNvmlCudaPlatform.device_count = classmethod(lambda cls: num_gpus)  # type: ignore[method-assign, assignment]
    NonNvmlCudaPlatform.is_cumem_allocator_available = lambda self: True  # type: ignore[method-assign]  # sleeping engines need it
    platforms._current_platform = NonNvmlCudaPlatform()
    import vllm.config.vllm as config_module

    config_module.HAS_TRITON = True  # a GPU machine has Triton
    for name in (
        "cutlass_scaled_mm_supports_block_fp8",
        "cutlass_scaled_mm_supports_fp8",
        "cutlass_group_gemm_supported",
    ):
        setattr(torch.ops._C, name, lambda capability: True)  # as compiled for an H100


def save_model(name: str, folder: Path) -> Path:
    """Write a directory of the published model, with a byte tokenizer."""
    from published_model import save_published

    from marsrl.trainer.checks.models import find_shape, taught_shape
    from marsrl.trainer.config import PolicyConfig, RunConfig

    shape = taught_shape(RunConfig(), PolicyConfig()) if name == "warm start" else find_shape(name)
    assert shape is not None
    return save_published(shape, folder / name)


def train_command(preset: Path) -> list[str]:
    """Return the arguments of the last training command in the file's header.

    The result is empty for math_default and cpu_default.
    """
    header = [line for line in preset.read_text(encoding="utf-8").splitlines() if line.startswith("#   ")]
    text = "\n".join(line.removeprefix("#   ").strip() for line in header).replace("\\\n", " ")
    return next((shlex.split(line) for line in reversed(text.splitlines()) if "trainer/main.py" in line), [])


def checked(preset: Path, folder: Path, words: list[str]) -> Any:
    """Run preflight with the settings and the number of ranks in the preset's training command."""
    from marsrl.trainer.checks.preflight import preflight
    from marsrl.trainer.config.read import read_config

    options = dict(itertools.pairwise(words))
    local = int(options.get("--nproc-per-node", "1"))
    world = local * int(options.get("--nnodes", "1"))
    model = next((word.partition("=")[2] for word in words if word.startswith("policies.main.model=")), None)
    settings = []
    if model is not None:
        name = "Qwen3-0.6B" if model == "/path/to/model" else Path(model).name
        (folder / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4, encoding="utf-8")
        settings = [f"policies.main.model={save_model(name, folder)}", f"data.train={folder}/problems.jsonl"]
        if any(word.startswith("tools.search.corpus=") for word in words):
            (folder / "corpus.jsonl").write_text('{"title": "Two", "text": "1 + 1 is 2."}', encoding="utf-8")
            settings.append(f"tools.search.corpus={folder}/corpus.jsonl")
    if read_config(preset, settings)[0].sync.directory is not None:
        settings.append(f"sync.directory={folder}")
    os.environ |= {"LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(world), "SERPAPI_API_KEY": "key"}  # MARS searches
    return preflight(read_config(preset, settings)[0], world)


def vllm_config(config: Any, folder: Path, adapters: Any = None) -> Any:
    """Return vLLM's configuration of an engine, with our VllmEngine's arguments and environment.

    adapters: the served adapters by name; "five": five adapters of all possible matrices; None: no adapters.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    from marsrl.rollout.adapter import AdapterConfig
    from marsrl.rollout.engines.build import environment_of
    from marsrl.rollout.engines.protocol import EngineSpec
    from marsrl.rollout.engines.vllm.arguments import engine_arguments
    from marsrl.rollout.model_shape import read_shape
    from marsrl.rollout.pool.build import with_settings
    from marsrl.trainer.checks.batch_plan import longest_sequence

    # Keep vLLM from caching facts about a model class in ~/.cache, and from importing kernels that this machine lacks.
    _LazyRegisteredModel._save_modelinfo_to_cache = lambda self, *info: None  # type: ignore[method-assign]
    policy = config.policies["main"]
    model = policy.model or str(save_model("warm start", folder))
    longest = longest_sequence(config, "main")
    mlp = "experts" if read_shape(model).num_experts else "mlp"
    adapter = AdapterConfig.model_validate({"rank": 24, "targets": ["attention", mlp]})
    spec = EngineSpec(
        "vllm",
        model,
        config.engine_dtype("main"),
        longest,
        records=config.records_of("main"),
        adapters={f"adapter {number}": adapter for number in range(5)} if adapters == "five" else adapters or {},
    )
    spec = with_settings(spec, config.rollout_of("main"))
    assert spec.device == "cuda"
    os.environ.update(environment_of(spec))
    return EngineArgs(**engine_arguments(spec)).create_engine_config()


def engine_config(config: Any, folder: Path, adapters: Any = None) -> dict[str, Any]:
    """Return the settings of vLLM's configuration that the tests check."""
    made = vllm_config(config, folder, adapters)
    lora = made.lora_config
    return {
        "runner": "V2" if made.use_v2_model_runner else "V1",
        "compile": made.compilation_config.mode.name,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "executor": made.parallel_config.distributed_executor_backend,
        "dtype": str(made.model_config.dtype),
        "moe": str(made.kernel_config.moe_backend),
        "processors": _processors(made),
        "logprobs": made.model_config.logprobs_mode,
        "experts": made.aux_output_config.enable_return_routed_experts,
        "kept": made.model_config.return_sampling_mask,
        "attention": _attention(made),
        "draws": _draws(made),
        "kv_cache": made.cache_config.cache_dtype,
        "weights": made.model_config.quantization,
        "batched": made.scheduler_config.max_num_batched_tokens,
        "async": made.scheduler_config.async_scheduling,
        "drafts": (drafts := made.speculative_config)
        and [drafts.method, drafts.num_speculative_tokens, drafts.rejection_sample_method, drafts.draft_sample_method],
        "adapters": lora
        and [lora.max_loras, lora.max_lora_rank, lora.target_modules, str(lora.lora_dtype), lora.fully_sharded_loras],
        "dynamo_off": os.environ.get("TORCHDYNAMO_DISABLE"),
    }


def adapters_of(config: Any) -> dict[str, Any]:
    """Return a preset's adapters, all on one base."""
    adapters = {name: config.policies[name].adapter for name in config.pools_of_adapters}
    return {name: adapter for name, adapter in adapters.items() if adapter is not None}


def _processors(made: Any) -> list[str]:
    """Return the names of our logits processors, as the chosen runner loads or refuses them."""
    from vllm.v1.sample.logits_processor import _load_custom_logitsprocs
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs

    load = _load_v2_logitsprocs if made.use_v2_model_runner else _load_custom_logitsprocs
    return [each.__name__ for each in load(made.model_config.logits_processors)]


def _attention(made: Any) -> str:
    """Return the attention backend that vLLM's CUDA platform picks; FlashInfer is not installed here."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model = made.model_config
    layers = AttentionSelectorConfig(model.get_head_size(), model.dtype, made.cache_config.cache_dtype, None)
    chosen = current_platform.get_attn_backend_cls(made.attention_config.backend, layers)
    return str(chosen).rpartition(".")[2]


def _draws(made: Any) -> str:
    """Return the method that samples top-p and top-k in warm-ups.

    Raises ImportError if it is FlashInfer's, which is not installed here.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    return str(TopKTopPSampler(made.model_config.logprobs_mode).forward.__name__)


def with_vllm(config: Any, **options: Any) -> Any:
    """Return the config with other options of vLLM."""
    vllm = config.rollout.vllm.model_copy(update=options)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"vllm": vllm})})


def fp8_layers(config: Any, folder: Path) -> dict[str, str]:
    """Return {layer: its kernel} of the model that vLLM builds for FP8 weights, on the meta device."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    one_layer = {"enforce_eager": True, "hf_overrides": {"num_hidden_layers": 1}}
    made = vllm_config(with_vllm(config, quantization="fp8", tensor_parallel=1, extra=one_layer), folder)
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        from vllm.model_executor.model_loader.utils import initialize_model

        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            model = initialize_model(vllm_config=made)
    methods = {name: module.quant_method for name, module in model.named_modules() if hasattr(module, "quant_method")}
    return {
        name: type(each.fp8_linear).__name__
        if hasattr(each, "fp8_linear")
        else str(getattr(each, "fp8_backend", type(each).__name__))
        for name, each in methods.items()
    }


def variants(config: Any, folder: Path) -> dict[str, Any]:
    """Return engines of the preset with other options of vLLM, and with router_replay=rollout (R3)."""
    draft = folder / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(DRAFT))
    replays = config.trainer.model_copy(update={"router_replay": "rollout"})
    asked = {
        "marsrl": with_vllm(config, sampler="marsrl"),
        "R3": config.model_copy(update={"trainer": replays}),
        "bfloat16_cache": with_vllm(config, kv_cache_dtype="auto"),
        "bfloat16": with_vllm(config, quantization=None),
        "drafts": with_vllm(config, draft_tokens=4),
        "draft_model": with_vllm(config, draft_tokens=3, draft_model=str(draft)),
        "extra": with_vllm(config, extra={"max_num_batched_tokens": 12345}),
    }
    return {name: engine_config(each, folder) for name, each in asked.items()}


def main(folder: Path) -> None:
    global num_gpus
    pretend_cuda()
    pretend_vllm_on_cuda()
    findings = {}
    for preset in sorted(Path("configs").glob("*.yaml")):
        num_gpus = min(8, int(match[1])) if (match := re.search(r"--gpus (\d+)", preset.read_text())) else 8
        check = checked(preset, folder, train_command(preset))
        has_vllm, adapters = check.config.rollout.engine == "vllm", adapters_of(check.config)
        findings[preset.stem] = {
            "engine": engine_config(check.config, folder) if has_vllm else None,
            "adapted": engine_config(check.config, folder, "five") if has_vllm else None,
            "own_adapters": engine_config(check.config, folder, adapters) if has_vllm and adapters else None,
            "prompts": {name: agent.max_input_tokens for name, agent in check.config.agents.items()},
            "variants": variants(check.config, folder) if preset.stem == "qwen3_30b_a3b_8xh100" else None,
        }
        if preset.stem == "qwen3_30b_a3b_8xh100":
            of_fp8 = check.config
    findings["qwen3_30b_a3b_8xh100"]["fp8_layers"] = fp8_layers(of_fp8, folder)  # last: it creates process groups
    print(json.dumps(findings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
