"""The planner and a dry run refuse the same settings; the planner and the doctor find the same lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from published_model import save_published

from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.needs import shortages_here
from marsrl.commands.plan.plan import make_plan
from marsrl.rollout.model_shape import read_shape
from marsrl.trainer.checks.models import find_shape
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import CONFIGS, ConfigError, read_config
from marsrl.trainer.learner.megatron import shim
from marsrl.trainer.learner.megatron.layout import resolve

MODELS = {"qwen3_8b": "Qwen3-8B", "qwen3_30b_a3b_8xh100": "Qwen3-30B-A3B", "single_gpu": "Qwen3-1.7B"}
OTHERS = "rollout.ray_address=192.0.2.200:6379"  # no host has this address, and none is contacted
VARIED: dict[str, tuple[object, ...]] = {
    "rollout.engines": (1, 2, 3, 5, 8),
    "rollout.placement": ("colocated",),
    "rollout.overlap": (0,),
    "rollout.vllm.tensor_parallel": (2, 3),
    "rollout.vllm.gpu_memory_utilization": (0.3, 0.7),
    "rollout.vllm.kv_cache_mib": (1, 4096, 100_000),
    "rollout.vllm.expert_parallel": ("true",),
    "rollout.ray_address": ("auto", "here"),
    "rollout.max_response_tokens": (1024, 65536, 200_000),
    "trainer.max_tokens_per_micro_batch": (98304,),
    "trainer.sleep": ("true",),
    "policies.main.layout.tensor": (1, 3, 4),
    "policies.main.layout.expert": (1, 2),
    "policies.main.layout.pipeline": (2, 5),
    "policies.main.layout.context": (2, 4),
    "policies.main.recompute": ("none", "selective", "full_but_attention", "full_offload"),
    "policies.main.deterministic": ("true",),
    "policies.main.overlap_dispatch": ("true",),
    "policies.main.optimizer.offload": ("true", "false"),
    "loss.ratio": ("sequence",),
    "loss.correction": ("none", "sequence_mask"),
    "sync.backend": ("nccl", "shm"),
    "sync.cpu_twin": ("true",),
}
WORDS = st.lists(
    st.sampled_from([(key, value) for key, values in VARIED.items() for value in values]),
    max_size=3,
    unique_by=lambda word: word[0],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shim.install()  # before a machine with CUDA is simulated
    folder = tmp_path_factory.mktemp("models")
    for name in MODELS.values():
        save_published(find_shape(name), folder / name)
    (folder / "problems.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4, encoding="utf-8")
    return folder


def planned(config: RunConfig, num_gpus: int, gpu: str) -> tuple[bool, set[str]]:
    """Return (whether the plan refuses the config, notes about what does not fit)."""
    try:
        plan = make_plan(config, num_gpus, gpu)
    except ValueError:
        return True, set()
    refused = bool(plan.refused) or any(policy.why_not_configured for policy in plan.policies)
    marks = ("does not fit", "but a GPU has", "vLLM needs room", "NCCL takes", "of host memory for")
    short = {note for note in plan.notes if any(mark in note for mark in marks)}
    assert refused or plan.fits == (not short), plan.notes
    return refused, short


def checked(config: RunConfig, world_size: int) -> tuple[bool, set[str]]:
    try:
        result = preflight(config, world_size)
    except ValueError:
        return True, set()
    mark = " (estimated by marsrl plan's formulas)"
    return False, {each.removesuffix(mark) for each in shortages_here(result.config, world_size)}


def megatron_takes(config: RunConfig) -> bool:
    """Run megatron's checks of the policy's settings, as on a GPU.

    Return whether its configs have the policy's recomputation and offloading.
    """
    from marsrl.trainer.learner.megatron.model import transformer_config
    from marsrl.trainer.learner.megatron.optimizer import optimizer_options

    policy = config.policies["main"]
    model = transformer_config(read_shape(str(policy.model)), resolve(policy.layout), policy)
    made = optimizer_options(policy.optimizer, model.params_dtype)
    whole = {"none": None, "full_offload": "full", "full_but_attention": "full"}
    recomputes = whole.get(policy.recompute, policy.recompute)
    return model.recompute_granularity == recomputes and made.optimizer_cpu_offload == policy.optimizer.offload


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
@given(
    preset=st.sampled_from(sorted(MODELS)),
    words=WORDS,
    num_gpus=st.sampled_from([8, 8, 8, 5, 16]),
    gpu_name=st.sampled_from(["h100-80g", "a100-40g"]),
)
@example("qwen3_8b", [("policies.main.layout", {"context": 3}), ("loss.ratio", "sequence")], 8, "h100-80g")
@example("qwen3_30b_a3b_8xh100", [("policies.main.optimizer.offload", "false")], 8, "h100-80g")
@example("qwen3_8b", [], 16, "a100-40g")
@example("qwen3_8b", [("policies.main.recompute", "full_offload")], 8, "h100-80g")
@example(
    "qwen3_8b", [("rollout.ray_address", "auto"), ("rollout.engines", 13), ("sync.backend", "shm")], 16, "h100-80g"
)
@example("qwen3_8b", [("rollout.ray_address", "here"), ("sync.backend", "shm")], 8, "h100-80g")
@example("qwen3_8b", [("rollout.vllm.kv_cache_mib", 1)], 8, "h100-80g")
@example("qwen3_8b", [("rollout.vllm.draft_tokens", 3), ("rollout.vllm.draft_model", "/none")], 8, "h100-80g")
@example("single_gpu", [("rollout.vllm.kv_cache_mib", 4096)], 1, "h100-80g")
@example("qwen3_8b", [("sync.cpu_twin", "true")], 8, "h100-80g")
def test_the_planner_and_the_dry_run_accept_the_same(
    folder: Path, preset: str, words: list[tuple[str, object]], num_gpus: int, gpu_name: str
) -> None:
    num_gpus = 1 if preset == "single_gpu" else num_gpus
    names_address = any(key == "rollout.ray_address" for key, _ in words)
    given_words = [f"{key}={value}" for key, value in words] + ([OTHERS] if num_gpus > 8 and not names_address else [])
    if num_gpus > 8 and ("sync.backend", "nccl") in words:
        given_words.append("sync.host=192.0.2.1")
    given_words += [f"policies.main.model={folder / MODELS[preset]}", f"data.train={folder}/problems.jsonl"]
    try:
        config = read_config(CONFIGS / f"{preset}.yaml", given_words)[0]
    except ConfigError:
        return  # the settings contradict each other, on any machine
    gpu = hw.GPUS[gpu_name]
    of_engines = sum(
        each.engines * each.vllm.tensor_parallel
        for each in config.served_rollouts.values()
        if each.placement == "disaggregated"
    )
    ranks = max(1, num_gpus - of_engines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: min(num_gpus, 8))
        patch.setattr(hw, "gpu_here", lambda: gpu)
        patch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
        patch.setenv("WORLD_SIZE", str(ranks))
        here, there = checked(config, ranks), planned(config, num_gpus, gpu_name)
        assert here[0] or megatron_takes(config), given_words
    assert here[0] == there[0], (given_words, here, there)
    assert here[0] or here[1] == there[1], (given_words, here, there)
