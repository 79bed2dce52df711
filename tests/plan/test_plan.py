"""`marsrl plan` reproduces known numbers, plans every preset, and refuses wrong settings."""

from __future__ import annotations

import functools
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from marsrl.commands import cli
from marsrl.commands.plan import hardware as hw
from marsrl.commands.plan.command import show
from marsrl.commands.plan.engines import (
    Demand,
    EngineSetup,
    engine_memory,
    kv_bytes_per_token,
    publish_bytes,
    rollout_time,
    slot_bytes,
    sync_time,
)
from marsrl.commands.plan.memory import Recompute, head_bytes
from marsrl.commands.plan.needs import shortages
from marsrl.commands.plan.plan import Plan, make_plan
from marsrl.commands.plan.ranking import step_seconds
from marsrl.trainer.checks.models import KNOWN
from marsrl.trainer.config.read import CONFIGS, ConfigError, read_config
from marsrl.trainer.learner.megatron.layout import Layout

MOE = KNOWN["Qwen3-30B-A3B"]
H100 = hw.GPUS["h100-80g"]
FITS_ON = {  # number of GPUs
    "qwen3_30b_a3b": 64,
    "qwen3_30b_a3b_8xh100": 8,
    "qwen3_30b_a3b_8xh200": 8,
    "qwen3_8b": 8,
    "drmas_math": 8,
    "ulorl": 64,
    "drmas_search": 8,
    "mars_qwen2.5_7b": 8,
    "mars_qwen3_8b": 8,
    "single_gpu": 1,
    "single_gpu_colocated": 1,
    "qwen3_0.6b_1gpu": 1,
    "qwen3_4b_1gpu": 1,
    "cpu_default": 2,
    "cpu_adapters": 2,
    "qwen3_30b_a3b_adapters_8gpu": 8,
    "qwen3_8b_adapters_1gpu": 1,
    "cpu_solver_verifier": 2,
    "cpu_search_team": 2,
    "cpu_dual_system": 2,
}
NEEDS_A_MODEL = {"math_default", "qa_default"}


OTHER_GPUS = {"qwen3_30b_a3b_8xh200": "h200-141g", "qwen3_0.6b_1gpu": "a100-40g"}


@functools.cache
def planned(preset: str, num_gpus: int, *words: str, gpu: str | None = None) -> Plan:
    gpu = gpu or OTHER_GPUS.get(preset, "h100-80g")
    return make_plan(read_config(preset, words)[0], num_gpus, gpu)


def shown(plan: Plan, width: int) -> str:
    """Return the tables, on a terminal of this width."""
    console = Console(width=width, file=io.StringIO())
    show(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("preset", sorted(FITS_ON))
def test_every_preset_fits_its_gpus(preset: str) -> None:
    config, _ = read_config(CONFIGS / f"{preset}.yaml")
    plan = planned(preset, FITS_ON[preset])
    assert plan.fits, plan.notes
    assert plan.step_s is not None and plan.step_s > 0
    assert [each.name for each in plan.policies] == [name for name, p in config.policies.items() if p.base is None]
    policy = plan.policies[0]
    assert policy.configured is not None and policy.configured.why_not
    assert policy.longest_sequence <= config.trainer.max_tokens_per_micro_batch
    text = shown(plan, 200)
    assert "(config)" in text and "KV cache" in text and "weight sync" in text
    assert all(constant.source.split(";")[0][:20] in text for constant in plan.constants)
    assert any(line.split()[-2:] == ["needs", "update"] for line in shown(plan, 80).splitlines())


@pytest.mark.parametrize("preset", sorted(FITS_ON))
def test_a_preset_is_within_5_percent_of_the_best_layout(preset: str) -> None:
    for policy in planned(preset, FITS_ON[preset]).policies:
        configured, best = policy.configured, policy.options[0]
        assert configured is not None and best.fits
        better = f"{best.layout.words}, recompute {best.recompute}"
        assert configured.time.total <= 1.05 * best.time.total, better


KEEPS_CACHE = {"drmas_math": "16 bits for keys and values"}  # {preset: the reason in its file}


@pytest.mark.parametrize("preset", sorted(FITS_ON))
def test_a_preset_is_within_5_percent_of_the_best_split(preset: str) -> None:
    """Splits divide the GPUs between training and engines; their engines may have other caches."""
    plan, reason = planned(preset, FITS_ON[preset]), KEEPS_CACHE.get(preset)
    assert reason is None or reason in (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")
    for policy in plan.policies:
        splits = [s for s in policy.splits if reason is None or s.engines.kv_cache == policy.engines.kv_cache]
        for best in splits[:1]:
            better = f"{best.num_trainers} train, engines {best.engines.words}, {best.update.layout.words}"
            assert plan.step_s is not None and plan.step_s <= 1.05 * best.step_s, better


def test_an_fp8_cache_is_proposed_only_where_keys_fit_it() -> None:
    (qwen3,), (qwen2_5,) = (planned(name, 8).policies for name in ("qwen3_8b", "mars_qwen2.5_7b"))
    assert {split.engines.kv_cache for split in qwen3.splits} == {"auto", "fp8"}
    assert {split.engines.kv_cache for split in qwen2_5.splits} == {"auto"}


@pytest.mark.parametrize("preset", sorted(FITS_ON))
def test_numbers_in_comments_of_a_preset_are_planned(preset: str) -> None:
    """Free memory is rounded down to GiB, or to tenths if the comment has them; sequences to integers."""
    text = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")
    plan = planned(preset, FITS_ON[preset])
    policy, gpu = plan.policies[0], hw.GPUS[plan.gpu]
    configured = policy.configured
    assert configured is not None and plan.step_s is not None
    options = {(option.layout, option.recompute): option for option in policy.options}

    def leaves(written: str, layout: Layout, recompute: Recompute) -> None:
        tenths = 10 if "." in written else 1
        free = (gpu.memory_bytes - options[layout, recompute].needed) / 2**30
        assert float(written) == math.floor(free * tenths) / tenths, (layout.words, recompute, free)

    for quoted in re.findall(r"([\d.]+) GiB free", text):
        leaves(quoted, configured.layout, configured.recompute)
    for mode, quoted in re.findall(r"\b(full|full_offload) leaves ([\d.]+)", text):
        leaves(quoted, configured.layout, mode)
    for words, quoted, percent in re.findall(r"(\{[^}]*\}) leaves ([\d.]+) and takes (\d+) % longer", text):
        layout = replace(Layout(1, 1, 1, 1, 1), **yaml.safe_load(words))
        leaves(quoted, layout, configured.recompute)
        longer = options[layout, configured.recompute].time.total / configured.time.total
        assert round(100 * longer) == 100 + int(percent), longer
    for quoted in re.findall(r"GPUs? holds? (\d+) sequences", text):
        assert int(quoted) == math.floor(policy.engine.longest_sequences), policy.engine.longest_sequences
    for quoted in re.findall(r"a step of (\d+) min", text):
        assert int(quoted) == round(plan.step_s / 60), plan.step_s / 60


def test_the_plan_names_presets_that_fit_on_one_gpu() -> None:
    fitting = {
        ("Qwen3-0.6B", "a100-40g"): "qwen3_0.6b_1gpu",
        ("Qwen3-1.7B", "a100-40g"): "qwen3_4b_1gpu",
        ("Qwen3-4B", "h100-80g"): "qwen3_4b_1gpu",
        ("Qwen3-8B", "h100-80g"): "qwen3_8b_adapters_1gpu",
        ("Qwen3-8B", "a100-40g"): None,
    }
    for (model, gpu), preset in fitting.items():
        plan = planned("single_gpu", 1, f"policies.main.model={model}", gpu=gpu)
        notes = [note for note in plan.notes if note.startswith(f"these presets fit {model} on one {gpu}: {preset} (")]
        assert not plan.fits and len(notes) == (preset is not None)
        if preset is not None:
            assert planned(preset, 1, f"policies.main.model={model}", gpu=gpu).fits
    with pytest.raises(ConfigError, match="or raise --gpus; presets for one GPU: single_gpu, "):
        planned("qwen3_8b", 1)


def test_doubled_problems_double_the_time_in_the_same_memory() -> None:
    once, twice = (planned("qwen3_8b", 8, f"rollout.prompts_per_step={n}").policies[0] for n in (64, 128))
    assert once.configured is not None and twice.configured is not None
    assert twice.configured.time.total == pytest.approx(2 * once.configured.time.total, rel=0.1)
    assert once.rollout.seconds < twice.rollout.seconds <= 2.1 * once.rollout.seconds
    assert twice.configured.needed == pytest.approx(once.configured.needed, rel=0.02)
    assert twice.sync.total == once.sync.total


def test_every_preset_is_planned_or_needs_a_model() -> None:
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == {*FITS_ON, *NEEDS_A_MODEL}
    for preset in NEEDS_A_MODEL:
        with pytest.raises(ValueError, match=r"policies.main.model is not set; set a directory or the name"):
            planned(preset, 8)


def test_kv_cache_of_the_published_model() -> None:
    assert kv_bytes_per_token(MOE, "bfloat16") == 98_304  # 2 x 48 layers x 4 heads x 128 x 2 bytes
    setup = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304)
    memory = engine_memory(setup, H100)
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048  # norms and router: on both GPUs
    assert memory.weights == 30_532_122_624 + whole * 2 / 2
    assert memory.kv_tokens * 98_304 / 2 == pytest.approx(memory.kv_cache, rel=1e-4)
    assert engine_memory(replace(setup, tensor_parallel=1), hw.GPUS["a100-40g"]).kv_tokens == 0
    eight = engine_memory(replace(setup, kv_cache="fp8"), H100)
    assert eight.kv_tokens == pytest.approx(2 * memory.kv_tokens) and eight.weights == memory.weights
    four, all_eight = (engine_memory(replace(setup, tensor_parallel=n), H100) for n in (4, 8))
    assert four.kv_tokens > 2.5 * memory.kv_tokens  # a shard of the weights leaves more room
    assert all_eight.kv_tokens < 1.2 * four.kv_tokens  # 4 KV heads: four of the GPUs hold copies


def test_fp8_weights_leave_room_and_are_read_in_half_the_time() -> None:
    whole = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304)
    half = replace(whole, weights="fp8")
    memory, less = engine_memory(whole, H100), engine_memory(half, H100)
    vocabulary, matrices = 2 * 151_936 * 2048, 48 * (2 * 2048 * (4096 + 512) + 128 * 3 * 768 * 2048)
    assert memory.weights - less.weights == matrices * (1 - 4 / 128**2) / 2
    assert less.weights > (matrices + 2 * vocabulary) / 2  # embedding and head stay in bfloat16
    assert less.kv_cache - memory.kv_cache == memory.weights - less.weights and half.words == "4 x 2, fp8 weights"
    four, whole_experts = (replace(half, tensor_parallel=4, spreads_experts=each) for each in (False, True))
    padding = engine_memory(four, H100).weights - engine_memory(whole_experts, H100).weights
    assert padding == pytest.approx(48 * 128 * 3 * 64 * 2048, rel=1e-3)  # 192 columns of an expert become 256
    few = Demand(8.0, 1000.0, 8000.0, 1, 1, 8000, True)  # two samples per engine: reading weights dominates
    seconds = [rollout_time(setup, memory, H100, few).seconds for setup in (whole, half)]
    assert seconds[1] < seconds[0]
    of_files = [sync_time("shm", setup, 4, 1, 12, H100) for setup in (whole, half)]
    assert of_files[0] == of_files[1]  # weights are rounded where they arrive
    for backend in ("nccl", "ipc"):
        plain, rounding = (sync_time(backend, setup, 4, 1, 12, H100) for setup in (whole, half))
        assert (rounding.send, rounding.copy, rounding.links_alone) == (plain.send, plain.copy, plain.links_alone)
        assert rounding.with_delta == plain.quantise == 0 < plain.total < rounding.total < of_files[1].total / 5
        memory_s = matrices / 2 / (0.9 * 3.35e12)  # time to move one byte for each number on a GPU
        assert rounding.quantise == pytest.approx(41 * memory_s)
        assert rounding.checksum - plain.checksum == pytest.approx(2 * 31 * memory_s)


def test_fp8_weights_are_planned_as_the_config_has_them() -> None:
    (policy,) = planned("qwen3_30b_a3b_8xh100", 8).policies
    (plain,) = planned("qwen3_30b_a3b_8xh100", 8, "rollout.vllm.quantization=null").policies
    assert policy.sync.backend == "nccl" and policy.engine.weights < 0.52 * plain.engine.weights
    assert {split.engines.weights for split in policy.splits} == {"fp8"}
    assert policy.splits[0].step_s < 0.75 * plain.splits[0].step_s


def test_a_draft_model_takes_memory_of_its_engines(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 4096,
        "vocab_size": 151_936,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **sizes}))
    (tmp_path / "model.safetensors").write_bytes(bytes(10_000))
    with_draft = planned("qwen3_8b", 8, "rollout.vllm.draft_tokens=3", f"rollout.vllm.draft_model={tmp_path}")
    (plain,), (policy,) = planned("qwen3_8b", 8).policies, with_draft.policies
    assert policy.engine.weights - plain.engine.weights == 10_000
    assert policy.engine.kv_bytes_per_token - plain.engine.kv_bytes_per_token == 2 * 32 * 128  # FP8
    assert policy.engine.kv_tokens < plain.engine.kv_tokens
    assert any("decoding is planned without drafts" in note for note in with_draft.notes)
    with pytest.raises(ValueError, match="rollout.vllm.draft_model: /none has no config.json"):
        planned("qwen3_8b", 8, "rollout.vllm.draft_tokens=3", "rollout.vllm.draft_model=/none")


WIDE = ["rollout.engines=10", "rollout.vllm.tensor_parallel=4", "rollout.vllm.quantization=null"]


def test_an_engine_that_does_not_fit_says_by_how_much() -> None:
    plan = planned("qwen3_30b_a3b", 64, "rollout.vllm.kv_cache_mib=90000", *WIDE)
    message = "cache take 105.1 GiB and NCCL's communicators 0.8 GiB, of 79.1 GiB; lower rollout.vllm.kv_cache_mib"
    assert any(message in note for note in plan.notes)
    fixed_cache = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304, cache_bytes=4096.0 * 2**20)
    assert not engine_memory(fixed_cache, H100).fits  # room for less than one sequence
    assert engine_memory(replace(fixed_cache, cache_bytes=2.0**34), H100).fits
    # More than the GPU has beside the weights.
    assert not engine_memory(replace(fixed_cache, cache_bytes=2.0**36), H100).fits


MIB = 2.0**20
FIRST = ["policies.main.layout={tensor: 4, expert: 8, pipeline: 1, context: 1}", *WIDE]


def test_publishes_by_nccl_take_memory_at_both_ends() -> None:
    far, near = planned("qwen3_30b_a3b", 64, *FIRST), planned("qwen3_30b_a3b_8xh100", 8)
    (policy,) = far.policies
    one = (2 + 3 * 4) * 2 * MIB + 4 * 2 * MIB  # between hosts: four channels, with buffers at both ends
    assert policy.rank_transfer_bytes == far.num_engine_gpus * one
    assert policy.engines.transfer_bytes == far.num_trainers * one
    pairs = far.num_trainers * far.num_engine_gpus
    assert pairs == 960 and f"{pairs} communicators of two GPUs take 1.4 GiB on each rank's GPU and 0.8" in shown(
        far, 200
    )
    (policy,) = near.policies
    small = (2 + 3 * 32) * 2 * MIB  # over NVLink: 32 channels, with buffers only on the receiver
    assert policy.rank_transfer_bytes == near.num_engine_gpus * small
    assert policy.engines.transfer_bytes == near.num_trainers * (small + 32 * 10 * MIB)
    (files,) = planned("qwen3_30b_a3b_8xh100", 8, "sync.backend=shm").policies
    assert files.engines.transfer_bytes == files.rank_transfer_bytes == 0
    assert policy.configured is not None and files.configured is not None
    assert policy.configured.needed == files.configured.needed + policy.rank_transfer_bytes


def test_nccl_is_named_if_only_its_memory_is_too_much() -> None:
    (policy,) = planned("qwen3_30b_a3b_8xh100", 8).policies
    assert policy.configured is not None
    for too_much, named in ((1.0, True), (2 * policy.rank_transfer_bytes, False)):
        smaller = replace(policy.gpu, memory_bytes=policy.configured.needed - too_much)
        short = replace(policy, gpu=smaller, configured=replace(policy.configured, fits=False))
        assert any("sync.backend=shm would fit" in note for note in shortages(short)) == named


def test_a_trainer_that_sleeps_leaves_engines_the_whole_gpu() -> None:
    """While engines decode, the learner's memory is on the host; copying it there and back takes time."""
    half = "rollout.vllm.gpu_memory_utilization=0.5"
    awake, asleep = (planned("single_gpu_colocated", 1, f"trainer.sleep={each}", half) for each in ("false", "true"))
    before, after = (plan.policies[0].configured for plan in (awake, asleep))
    assert before is not None and after is not None
    memory = after.memory
    assert memory.asleep == memory.weights + memory.optimizer == memory.static - memory.gradients
    assert (before.memory.asleep, before.memory.host) == (0, 0) and memory.host == 2 * memory.asleep  # hw.PINNED is 2
    copies_s = 2 * (memory.asleep + memory.weights) / (64e9 * 0.8)  # the publish reads the weights twice
    assert after.time.total - before.time.total == pytest.approx(copies_s)
    assert before.needed == after.needed  # an update needs the same memory
    wide = planned("single_gpu_colocated", 1, "rollout.vllm.gpu_memory_utilization=0.95", "trainer.sleep=false")
    assert not wide.fits and not any("CUDA context alone" in note for note in wide.notes)
    assert any(
        "GiB beside the engine's 75.1; set trainer.sleep=true, or lower rollout.vllm.gpu" in n for n in wide.notes
    )
    wide = planned("single_gpu_colocated", 1, "rollout.vllm.gpu_memory_utilization=0.95")
    assert wide.fits and any("CUDA context alone" in note for note in wide.notes)
    policy = planned("qwen3_4b_1gpu", 1).policies[0]  # its optimizer is in host memory even when awake
    assert policy.configured is not None and policy.configured.memory.asleep == policy.configured.memory.weights
    assert policy.configured.needed == policy.engine.taken + hw.PROCESS_BYTES.value


def test_an_overlapped_exchange_costs_memory_and_no_planned_time() -> None:
    words = ["layout.pipeline=1", "layout.expert=4", "recompute=selective", "optimizer.offload=false"]
    alone, overlapped = (
        planned("qwen3_30b_a3b_8xh100", 8, "rollout.engines=4", *(f"policies.main.{word}" for word in [*words, last]))
        for last in ("overlap_dispatch=false", "overlap_dispatch=true")
    )
    before, after = (plan.policies[0].configured for plan in (alone, overlapped))
    assert before is not None and after is not None and after.time == before.time
    assert after.memory.activations - before.memory.activations > before.memory.activations / 48 * 0.9
    assert ["overlap_dispatch=false, because" in "".join(plan.notes) for plan in (alone, overlapped)] == [False, True]


def test_overlap_takes_the_longer_of_decoding_and_training() -> None:
    assert step_seconds([10.0, 30.0], [20.0, 5.0], [1.0, 2.0], overlap=0) == 58.0
    assert step_seconds([10.0, 30.0], [20.0, 5.0], [1.0, 2.0], overlap=1) == 33.0
    assert step_seconds([10.0], [20.0], [1.0], overlap=2) == 21.0
    turns, beside = planned("qwen3_8b", 8, "rollout.overlap=0"), planned("qwen3_8b", 8)
    (policy,) = beside.policies
    assert turns.step_s is not None and beside.step_s is not None and policy.chosen is not None
    assert beside.step_s == max(policy.rollout.seconds, policy.chosen.time.total) + policy.sync.total
    assert beside.step_s < turns.step_s - 0.9 * min(policy.rollout.seconds, policy.chosen.time.total)
    assert any("at most about 3 versions after its first token" in note and "tis" in note for note in beside.notes)
    assert any("set loss.correction=tis" in note for note in planned("qwen3_8b", 8, "loss.correction=none").notes)


def test_a_plan_that_does_not_fit_names_the_reasons() -> None:
    plan = planned("qwen3_30b_a3b_8xh100", 8, "policies.main.optimizer.offload=false")
    assert not plan.fits and plan.step_s is None
    assert any("no layout fits on 3 trainer GPUs" in n and "optimizer state" in n for n in plan.notes), plan.notes
    words = ["policies.main.layout.tensor=8", "rollout.vllm.tensor_parallel=1", "rollout.vllm.quantization=null"]
    notes = " ".join(planned("qwen3_30b_a3b", 64, *words, gpu="a100-40g").notes)
    assert "does not divide the 4 key/value heads" in notes and "a valid layout for " in notes
    assert "an engine of policy main does not fit: per GPU, its weights take 56.9 GiB" in notes
    with pytest.raises(ConfigError, match="is 32768, but trainer.max_tokens_per_micro_batch is 24576"):
        planned("qwen3_8b", 8, "rollout.max_response_tokens=32768")


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(CONFIGS / "qwen3_30b_a3b.yaml")
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--config", config, "--gpus", "64", "--gpu", "h200-141g", "--json", str(out)]) == 0
    assert "64 x h200-141g: 16 train, 48 decode" in capsys.readouterr().out
    written = json.loads(out.read_text())
    (policy,) = written["policies"]
    assert policy["parameters"] == 30_532_122_624 and written["fits"] is True
    ranked = [o["seconds"] for o in policy["options"] if o["fits"]]
    assert ranked == sorted(ranked) and len(ranked) > 50
    assert all(c["source"] for c in written["constants"])
    command = ["plan", "--config", config, "--gpus", "64", "--response", "8192", "--json", "-"]
    assert cli.main(command) == 0
    shorter = json.loads(capsys.readouterr().out)
    assert shorter["policies"][0]["longest_sequence"] == 32768 + 8192
    assert shorter["step_s"] < written["step_s"]


@pytest.mark.parametrize("command", [["plan", "--gpus", "8", "--json"], ["compare", "a", "b", "--html"]])
def test_a_command_replaces_no_file_of_a_run(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = tmp_path / "run" / "checkpoints" / "summary.json"
    summary.parent.mkdir(parents=True)
    for file in (summary, tmp_path / "run" / "config.yaml", tmp_path / "run" / "lock"):
        file.write_text("kept")
    assert cli.main([*command, str(summary)]) == 2
    assert f"{summary} is a file of the run in {tmp_path / 'run'} and is never replaced" in capsys.readouterr().err
    assert summary.read_text() == "kept"


SHORT = ["--gpus", "64", "--response", "100", "--mean-response"]
OTHER = ["agents.verifier1.policy=judge", "policies.judge={model: Qwen3-4B, engines: 3}"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "64", "--gpu", "tpu"], "h100-80g"),
        (["--gpus", "8"], "24 engines x 2 GPUs = 48 GPUs, but --gpus is 8, so none is left for training"),
        (["--gpus", "54", *OTHER], "24 engines x 2 GPUs + 3 engines x 2 GPUs = 54 GPUs, but --gpus is 54"),
        (["--gpus", "8", "rollout.engines=9"], "or raise --gpus (rollout.engines: command line)"),
        (["--gpus", "64", "policies.main.model=Llama-7B"], "Llama-7B is not among the models with a known shape"),
        (["--gpus", "1000000000000"], "65536"),
        ([*SHORT, "nan"], "--mean-response is nan, expected more than 0 and at most rollout.max_response_tokens, 100"),
        ([*SHORT, "101"], "--mean-response is 101, expected more than 0 and at most"),
        (["--gpus", "8", "--response", "1000000000000"], "rollout.max_response_tokens: Input should be less than"),
    ],
)
def test_impossible_plan_arguments_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", str(CONFIGS / "qwen3_30b_a3b.yaml"), *words]) == 2
    assert says in capsys.readouterr().err


def test_the_engines_of_two_policies_share_gpus_by_their_load() -> None:
    policy_8b = "model: Qwen3-8B, dtype: bfloat16, layout: {tensor: 2}, recompute: full"
    policy_4b = policy_8b.replace("Qwen3-8B", "Qwen3-4B")
    words = [f"policies={{solver: {{{policy_8b}, engines: 5}}, verifier: {{{policy_4b}, engines: 3}}}}"]
    words += ["agents.solver.policy=solver", "agents.verifier.policy=verifier"]
    near = planned("drmas_math", 16, *words)
    assert any("share 8 GPUs (solver 5, verifier 3)" in note and "no other split" in note for note in near.notes)
    words[0] = words[0].replace("engines: 5", "engines: 1").replace("engines: 3", "engines: 7")
    far = planned("drmas_math", 16, *words)
    (note,) = (note for note in far.notes if "share 8 GPUs (solver 1, verifier 7)" in note)
    pattern = r"take (\d+) s; solver (\d), verifier (\d) would take (\d+) s"
    before, solver, verifier, after = map(int, re.findall(pattern, note)[0])
    assert solver + verifier == 8 and solver > verifier and after < before / 2
    alone = max(policy.rollout.seconds for policy in near.policies)
    assert after <= round(alone)  # the proposed split is at least as good as the one in `near`
    one = planned("drmas_math", 8)
    assert not any("share" in note and "engines" in note for note in one.notes)


def test_past_versions_take_slots_but_no_publish() -> None:
    words = ["agents.verifier2.policy=verifier1", "run.eval_every=5"]
    (plain,) = planned("qwen3_30b_a3b_adapters_8gpu", 8, *words).policies
    (league,) = planned("qwen3_30b_a3b_adapters_8gpu", 8, *words, "league={policy: verifier1, size: 8}").policies
    assert len(plain.engines.adapters) == 4 and slot_bytes(league.engines) == 12 / 4 * slot_bytes(plain.engines)
    assert league.sync == plain.sync and league.job.training == plain.job.training


def test_adapters_of_one_base_are_planned_together() -> None:
    (full,) = planned("qwen3_30b_a3b_8xh100", 8).policies
    (plan,) = planned("qwen3_30b_a3b_adapters_8gpu", 8).policies
    assert plan.name == "main" and plan.work == full.work  # samples of all five agents
    adapter = plan.engines.adapters[0]
    numbers = 48 * 32 * (3 * 2048 + 4096 + 2 * 512 + 4096 + 2048)  # A and B of q, k, v and o of each layer
    assert len(plan.engines.adapters) == 5 and publish_bytes(plan.engines, adapter) == 2 * numbers
    assert plan.configured is not None
    memory = plan.configured.memory
    half = numbers / 2  # a stage has half of the layers
    assert memory.gradients == 4 * 5 * half and memory.optimizer == 12 * 5 * half
    assert plan.sync.backend == "shm"
    of_head = replace(plan.job.training, adapters=())
    assert head_bytes(of_head) - head_bytes(plan.job.training) == 4 * 2048 * 151936
