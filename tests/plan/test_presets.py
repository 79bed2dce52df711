"""Real code accepts every file of configs/, as far as a machine without a GPU can check."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marsrl.rollout.adapter import AdapterConfig
from marsrl.rollout.config import RolloutConfig, VllmOptions
from marsrl.rollout.engines.protocol import Records
from marsrl.rollout.engines.refusals import (
    TrainerHost,
    adapter_refusals,
    is_this_host,
    num_engine_gpus,
    refusals,
    vllm_refusals,
    why_not_cut,
)
from marsrl.rollout.engines.vllm.arguments import checked_extra
from marsrl.trainer.checks.models import KNOWN, find_shape
from marsrl.trainer.config.read import CONFIGS, read_config

PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
# Presets whose engine is our own (rollout.engine=local).
WITHOUT_VLLM = {"cpu_solver_verifier", "cpu_search_team", "cpu_dual_system", "cpu_adapters"}
# Presets whose engines have several GPUs each (rollout.vllm.tensor_parallel).
ON_SEVERAL_GPUS = {"qwen3_30b_a3b", "qwen3_30b_a3b_adapters_8gpu", "ulorl"}


# vLLM's methods of accepting and drawing draft tokens; test_vllm_v2_runner.py shows that they are exact.
EXACT = [
    "standard",
    "greedy",
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Findings of preset_worker.py by preset: 25 s in one process that simulates CUDA."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "preset_worker.py")]
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("presets"))],
        cwd=CONFIGS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    by_preset: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (
        sorted(by_preset) == PRESETS
        and {name for name in by_preset if by_preset[name]["engine"] is None} == WITHOUT_VLLM
    )
    return by_preset


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - WITHOUT_VLLM))
def test_vllm_accepts_an_engine_of_the_preset_and_compiles_it(preset: str, findings: dict[str, Any]) -> None:
    engine = findings[preset]["engine"]
    assert engine["runner"] == "V2" and engine["processors"] == [] and engine["logprobs"] == "processed_logprobs"
    assert engine["compile"] == "VLLM_COMPILE" and engine["graphs"] == "FULL_AND_PIECEWISE"
    assert engine["dynamo_off"] is None  # otherwise vLLM's compilation fails: "aot_compile is not supported"
    assert engine["executor"] == ("mp" if preset in ON_SEVERAL_GPUS else "uni")
    # FlashAttention does not support float32.
    assert engine["attention"] == ("Triton" if preset == "cpu_default" else "Flash") + "AttentionBackend"
    assert engine["moe"] == "triton"  # checksums expect the layout of this backend
    assert engine["dtype"] == ("torch.float32" if preset == "cpu_default" else "torch.bfloat16")
    assert engine["kept"] == preset.startswith("mars_") and not engine["experts"]  # loss.truncation=renormalise


@pytest.mark.slow
def test_vllm_accepts_other_options_of_an_engine(findings: dict[str, Any]) -> None:
    variants = findings["qwen3_30b_a3b_8xh100"]["variants"]
    plain, ours = findings["qwen3_30b_a3b_8xh100"]["engine"], variants["marsrl"]
    assert ours["runner"] == "V1" and ours["processors"] == ["DrawTokens"] and ours["graphs"] == "FULL_AND_PIECEWISE"
    assert ours["logprobs"] == "raw_logprobs" and ours["draws"] == "forward_native"  # FlashInfer would need nvcc
    assert variants["R3"] == plain | {"experts": True}
    assert variants["bfloat16_cache"] == plain | {"kv_cache": "auto"} and plain["kv_cache"] == "fp8"
    assert variants["bfloat16"] == plain | {"weights": None} and plain["weights"] == "fp8_per_block"
    assert (
        variants["drafts"] == plain | {"drafts": ["ngram_gpu", 4, *EXACT]}
        and plain["drafts"] is None
        and plain["async"]
    )
    # Also with FP8 weights, and an FP8 cache.
    assert variants["draft_model"] == plain | {"drafts": ["eagle3", 3, *EXACT]}
    assert variants["extra"] == plain | {"batched": 12345} != plain


@pytest.mark.slow
def test_vllm_fp8_kernels_read_weights_as_they_are_rounded(findings: dict[str, Any]) -> None:
    """These kernels do not pack, transpose, pad, or round to powers of two.

    Routers, embedding and head are not quantised.
    """
    layer = "model.layers.0"
    assert findings["qwen3_30b_a3b_8xh100"]["fp8_layers"] == {
        "model.embed_tokens": "UnquantizedEmbeddingMethod",
        f"{layer}.self_attn.qkv_proj": "CutlassFp8BlockScaledMMKernel",
        f"{layer}.self_attn.o_proj": "CutlassFp8BlockScaledMMKernel",
        f"{layer}.mlp.gate": "UnquantizedLinearMethod",
        f"{layer}.mlp.experts.routed_experts": "Fp8MoeBackend.TRITON",
        "lm_head": "UnquantizedEmbeddingMethod",
    }


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - WITHOUT_VLLM))
def test_vllm_accepts_adapters_and_changes_nothing_else(preset: str, findings: dict[str, Any]) -> None:
    """Adapter slots exist only for adapted matrices, with the next larger rank for which vLLM has kernels."""
    plain, adapted = findings[preset]["engine"], findings[preset]["adapted"]
    is_moe = preset.startswith("qwen3_30b_a3b") or preset in ("ulorl", "cpu_default")
    of_mlp = ["experts"] if is_moe else ["gate_up_proj", "down_proj"]
    assert adapted == plain | {"adapters": [5, 32, ["qkv_proj", "o_proj", *of_mlp], plain["dtype"], False]}
    assert plain["adapters"] is None


@pytest.mark.slow
def test_vllm_accepts_the_adapters_of_a_preset(findings: dict[str, Any]) -> None:
    attention, mlp = ["qkv_proj", "o_proj"], ["gate_up_proj", "down_proj"]
    for preset, targets in ("qwen3_30b_a3b_adapters_8gpu", attention), ("qwen3_8b_adapters_1gpu", [*attention, *mlp]):
        assert findings[preset]["own_adapters"]["adapters"][:3] == [5, 32, targets]


@pytest.mark.slow
def test_preset_agents_get_prompts_of_their_configured_length(findings: dict[str, Any]) -> None:
    for preset in PRESETS:
        config, _ = read_config(CONFIGS / f"{preset}.yaml")
        assert findings[preset]["prompts"] == {name: agent.max_input_tokens for name, agent in config.agents.items()}


HEAD = "10.11.12.13:6379"
NODE = TrainerHost(num_gpus=8, num_ranks=4, has_others=False)
WIDE: dict[str, Any] = {"vllm": {"tensor_parallel": 2}}
ON_A_CLUSTER = TrainerHost(8, 8, True)


@pytest.mark.parametrize(
    ("settings", "host", "files", "says"),
    [
        (WIDE | {"engines": 3}, NODE, "/dev/shm", r"tensor_parallel=2 needs 6 GPU.* set rollout.engines=2, or"),
        (WIDE | {"engines": 3, "placement": "colocated"}, NODE, "/dev/shm",
         r"this host has 4 such GPU.s.; set rollout.engines=2"),
        (WIDE | {"placement": "local"}, NODE, "/dev/shm",
         "which 4 trainer ranks hold; set rollout.vllm.tensor_parallel=1"),
        ({"vllm": {"tensor_parallel": 16}, "placement": "local"}, TrainerHost(8, 1, False), "/dev/shm",
         "is 16, but an engine's GPUs must be on one host, and hosts have 8; set rollout.vllm.tensor_parallel=8 or less"),
        (WIDE | {"engine": "local"}, TrainerHost(0, 1, False), "/dev/shm",
         "computes in one process; set rollout.vllm.tensor_p"),
        ({"engines": 5}, NODE, "/dev/shm",
         r"needs 5 GPU.s. without a trainer rank, but .* has 8, of which 4 have ranks; .*set rollout.engines=4, or"),
        ({"engines": 2}, TrainerHost(8, 8, False), "/dev/shm", r"start 6 rank.s. here \(torchrun --nproc-per-node 6\)"),
        ({"engines": 1}, TrainerHost(1, 1, False), "/dev/shm", "set rollout.placement=local, or set rollout.ray_address to"),
        ({"ray_address": HEAD}, ON_A_CLUSTER, "/dev/shm",
         r"writes weights to /dev/shm on trainer rank 0's .* cannot read; set sync.directory to a folder"),
        # A cluster that has other hosts for the engines.
        ({"ray_address": "auto", "engines": 40}, TrainerHost(8, 8, False), "/dev/shm",
         r"to /dev/shm on trainer rank 0's .* rollout.ray_address=auto cannot read; set sync.directory to a folder"),
        ({"engines": 4}, NODE, "/dev/shm", None),
        ({"engines": 64}, TrainerHost(0, 1, False), "/dev/shm", None),  # ranks and engines run on CPUs
        ({"vllm": {"kv_cache_mib": 256}}, TrainerHost(1, 1, False), "/dev/shm", None),  # the default run, on one GPU
        ({"ray_address": HEAD}, ON_A_CLUSTER, "/shared", None),
        ({"ray_address": HEAD}, ON_A_CLUSTER, None, None),  # backends nccl and ipc, without files
        ({"ray_address": "auto", "engines": 40}, TrainerHost(0, 1, False), "/dev/shm", None),
        (WIDE | {"engines": 2}, NODE, "/dev/shm", None),
        (WIDE | {"placement": "local"}, TrainerHost(2, 1, False), "/dev/shm", None),
        # The cluster's hosts may have 8 GPUs.
        ({"vllm": {"tensor_parallel": 8}, "ray_address": HEAD}, TrainerHost(1, 1, True), None, None),
    ],
)  # fmt: skip
def test_rejections_name_the_nearest_setting_that_works(
    settings: dict[str, Any], host: TrainerHost, files: str | None, says: str | None
) -> None:
    found = refusals((RolloutConfig.model_validate(settings),), host, weight_files=files)
    assert len(found) == (says is not None) and all(re.search(str(says), sentence) for sentence in found), found


def test_gpus_of_all_policies_engines_are_counted() -> None:
    three, one = (RolloutConfig(engines=engines) for engines in (3, 1))
    assert num_engine_gpus((three, one)) == 4 and refusals((three, one), NODE, weight_files=None) == ()
    (sentence,) = refusals((three, one, one), NODE, weight_files=None)
    assert "policies.<name>.engines (3 + 1 + 1) needs 5 GPU(s) without a trainer rank, but this host has 8" in sentence
    assert list(NODE.gpus_for((three, one))) == [4, 5, 6, 7]
    both = (RolloutConfig(placement="colocated", vllm=VllmOptions(tensor_parallel=2)),) * 2
    (sentence,) = refusals(both, NODE, weight_files=None)
    assert "colocated gives each of 2 policies a share of one GPU; set rollout.vllm.tensor_parallel=1" in sentence


@pytest.mark.parametrize(
    ("model", "changes", "options", "says"),
    [
        ("Qwen3-30B-A3B", {}, {}, None),
        ("Qwen3-30B-A3B", {}, {"tensor_parallel": 8}, None),  # two GPUs hold the same key head
        ("Qwen3-30B-A3B", {}, {"tensor_parallel": 8, "expert_parallel": True}, None),
        ("Qwen3-30B-A3B", {}, {"tensor_parallel": 3},
         "does not divide the model's 32 attention heads; set rollout.vllm.tensor_parallel=2"),
        ("Qwen3-30B-A3B", {"ffn_size": 784}, {"tensor_parallel": 32},
         "does not divide the model's MLP width of 784; set rollout.vllm.tensor_parallel=16"),
        ("Qwen3-30B-A3B", {"ffn_size": 784}, {"tensor_parallel": 32, "expert_parallel": True}, None),
        ("Qwen3-30B-A3B", {"hidden_size": 2112}, {"quantization": "fp8", "tensor_parallel": 4},
         "in multiples of 128, but the model's is 2112; set rollout.vllm.quantization to null"),
        ("Qwen3-30B-A3B", {}, {"quantization": "fp8", "tensor_parallel": 4}, None),
        # The limit applies only to experts, and a dense model has none.
        ("Qwen3-8B", {"hidden_size": 4160}, {"quantization": "fp8", "tensor_parallel": 4}, None),
        ("Qwen3-8B", {}, {"tensor_parallel": 2, "expert_parallel": True},
         "but Qwen3ForCausalLM has none; set it to false"),
    ],
)  # fmt: skip
def test_tensor_parallel_must_divide_the_model(
    model: str, changes: dict[str, Any], options: dict[str, Any], says: str | None
) -> None:
    found = why_not_cut(replace(KNOWN[model], **changes), VllmOptions.model_validate(options))
    assert (found is None) == (says is None) and (found is None or found.endswith(str(says))), found


def test_addresses_of_this_machine_are_recognised() -> None:
    assert is_this_host("127.0.0.1:6379") and is_this_host("ray://localhost:10001") and is_this_host("auto")
    assert not is_this_host("192.0.2.200:6379") and not is_this_host("no-such-host.invalid:6379")


EXPERTS, KEPT = Records(experts=True), Records(kept_tokens=True)


@pytest.mark.parametrize(
    ("options", "device", "records", "says"),
    [
        ({"sampler": "marsrl"}, "cuda", EXPERTS, "^trainer.router_replay=rollout .*vllm.sampler=engine"),
        ({}, "cpu", EXPERTS, "on a CPU vLLM uses Model Runner V1; set rollout.engine=local"),
        ({"sampler": "engine"}, "cpu", KEPT, "^loss.truncation=.* set rollout.vllm.sampler=marsrl"),
        ({}, "cuda", Records(kept_tokens=True, experts=True), None),
        ({"draft_tokens": 4}, "cuda", Records(kept_tokens=True, experts=True), None),
        ({"draft_tokens": 4}, "cpu", Records(), "draft_tokens is 4, but on a CPU .* or draft_tokens=0"),
        ({"draft_tokens": 4, "sampler": "marsrl"}, "cuda", Records(), "draws one token at a time; .*sampler=engine"),
        ({"sampler": "marsrl"}, "cuda", KEPT, None),
        ({}, "cpu", KEPT, None),
        ({"quantization": "fp8"}, "cuda", Records(), None),
    ],
)
def test_unsupported_vllm_options_name_an_alternative(
    options: dict[str, Any], device: str, records: Records, says: str | None
) -> None:
    found = vllm_refusals(VllmOptions.model_validate(options), device, records)
    assert len(found) == (says is not None) and all(re.search(str(says), sentence) for sentence in found), found


@pytest.mark.slow
@pytest.mark.smoke
def test_other_arguments_of_vllm_are_checked_against_its_own() -> None:
    given = {"max_num_batched_tokens": 12345, "compilation_config": {"mode": 0}}
    assert checked_extra(given).keys() == given.keys()
    for extra, says in (
        ({"max_num_batched_token": 1}, r"max_num_batched_token is not a field .* similar ones: max_num_batched_tokens"),
        ({"max_num_batched_tokens": "many"}, r"extra.max_num_batched_tokens is 'many', which .* valid integer"),
        ({"speculative_config": {}}, r"marsrl sets itself; set rollout.vllm.draft_tokens instead"),
        ({"tensor_parallel_size": 2}, r"marsrl sets itself; set rollout.vllm.tensor_parallel instead"),
        ({"enable_prefix_caching": False}, r"marsrl sets itself; marsrl depends on its value"),
    ):
        with pytest.raises(ValueError, match=says):
            checked_extra(extra)


DENSE, MOE = (find_shape(name) for name in ("Qwen3-0.6B", "Qwen3-30B-A3B"))


@pytest.mark.parametrize(
    ("settings", "device", "dtype", "shape", "targets", "says"),
    [
        ({}, "cuda", "bfloat16", MOE, ("attention", "experts"), None),
        ({}, "cpu", "float32", DENSE, ("attention", "mlp"), None),
        ({}, "cpu", "float32", MOE, ("attention",), None),
        ({"engine": "local"}, "cpu", "float32", MOE, ("attention", "experts"), None),
        ({}, "cpu", "float32", MOE, ("attention", "experts"), "policies.verifier.adapter.targets .* rollout.engine=local"),
        (WIDE, "cpu", "float32", MOE, ("attention",), "set rollout.vllm.tensor_parallel=1, or rollout.engine=local"),
        ({}, "cuda", "float32", DENSE, ("attention",), r"adapters \(verifier\) do not support float32 on GPUs; .* bfloat16"),
        ({"vllm": {"draft_tokens": 4}}, "cuda", "bfloat16", DENSE, ("attention",), r"untested with adapters \(verifier\)"),
        (
            {"vllm": {"tensor_parallel": 2, "expert_parallel": True, "extra": {"all2all_backend": "deepep_low_latency"}}},
            "cuda", "bfloat16", MOE, ("experts",), "all2all_backend is deepep_low_latency.* allgather_reducescatter",
        ),
    ],
)  # fmt: skip
def test_unservable_adapters_are_rejected_with_what_would_work(
    settings: Any, device: str, dtype: str, shape: Any, targets: Any, says: str | None
) -> None:
    rollout = RolloutConfig.model_validate({"engine": "vllm", **settings})
    found = adapter_refusals(rollout, device, dtype, shape, {"verifier": AdapterConfig(targets=targets)})
    assert len(found) == (says is not None) and all(re.search(str(says), sentence) for sentence in found), found
