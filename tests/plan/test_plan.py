"""`marsrl plan`: formulas against numbers known from elsewhere, every config of the repository, and the refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from marsrl.trainer import cli
from marsrl.trainer.config.read import CONFIGS, ConfigError, read_config
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.command import show
from marsrl.trainer.plan.engines import Demand, EngineSetup, engine_memory, kv_bytes_per_token, rollout_time
from marsrl.trainer.plan.memory import Training, batch_bytes, most_loaded_rank, rank_memory, remade_bytes
from marsrl.trainer.plan.models import KNOWN
from marsrl.trainer.plan.placement import with_backend
from marsrl.trainer.plan.plan import Plan, make_plan
from marsrl.trainer.plan.speed import Work, step_time
from marsrl.trainer.plan.splits import step_seconds
from marsrl.trainer.plan.sync import sync_time

MOE = KNOWN["Qwen3-30B-A3B"]
H100 = hw.GPUS["h100-80g"]
SETUP = Training(MOE, Layout(4, 8, 1, 1, 1), 32, "bfloat16", "full", 65536, 8, 2048)
WORK = Work(1024, 1024 * 20_000.0, 1024 * 18_000.0)
PLANNED_ON = {
    "qwen3_30b_a3b": 64,
    "qwen3_30b_a3b_8xh100": 8,
    "qwen3_8b": 8,
    "drmas_math": 8,
    "ulorl": 64,
    "drmas_search": 8,
    "mars_qwen2.5_7b": 8,
    "mars_qwen3_8b": 8,
    "single_gpu": 1,
    "cpu_default": 2,
    "cpu_solver_verifier": 2,
    "cpu_search_team": 2,
    "cpu_dual_system": 2,
}
NEEDS_A_MODEL = {"math_default", "qa_default"}


def planned(preset: str, num_gpus: int, *words: str, gpu: str = "h100-80g") -> Plan:
    return make_plan(read_config(preset, words)[0], num_gpus, gpu)


@pytest.mark.parametrize("preset", sorted(PLANNED_ON))
def test_every_preset_fits_where_it_says(preset: str) -> None:
    config, _ = read_config(CONFIGS / f"{preset}.yaml")
    plan = make_plan(config, PLANNED_ON[preset], "h100-80g")
    assert plan.fits, plan.notes
    assert plan.step_s is not None and plan.step_s > 0
    assert [policy.name for policy in plan.policies] == list(config.policies)
    policy = plan.policies[0]
    assert policy.configured is not None and policy.configured.why_not
    assert policy.longest_sequence <= config.trainer.max_tokens_per_micro_batch
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    show(plan, console)
    text = console.export_text()
    assert "(config)" in text and "KV cache" in text and "weight sync" in text
    assert all(constant.source.split(";")[0][:20] in text for constant in plan.constants)
    narrow = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    show(plan, narrow)
    assert any(line.split()[-2:] == ["needs", "update"] for line in narrow.export_text().splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "-5"), "--gpus is -5, expected 1 to 65,536"),
        (("--gpus", "1000000000000"), "--gpus is 1,000,000,000,000, expected 1 to 65,536"),
        (("--gpus", "8", "--mean-response", "-5"), "--mean-response is -5, expected more than 0 and at most rollout.max_resp"),
        (("--gpus", "8", "--mean-response", "nan"), "--mean-response is nan, expected more than 0"),
        (("--gpus", "8", "--response", "100", "--mean-response", "101"), "at most rollout.max_response_tokens, 100"),
        (("--gpus", "8", "--response", "1000000000000"), "rollout.max_response_tokens: Input should be less than"),
    ],
)  # fmt: skip
def test_absurd_sizes_are_refused_by_name(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--config", "cpu_default", *words]) == 2
    assert says in capsys.readouterr().err


def test_no_preset_is_left_out() -> None:
    assert {p.stem for p in CONFIGS.glob("*.yaml")} == set(PLANNED_ON) | NEEDS_A_MODEL
    for preset in NEEDS_A_MODEL:
        with pytest.raises(ValueError, match=r"policies.main.model is not set; give a directory, or the name"):
            planned(preset, 8)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["rollout.vllm.tensor_parallel=3", "rollout.engine=local"],
            "rollout.engine=local computes in one process: set rollout.vllm.tensor_parallel=1",
        ),
        (
            ["rollout.ray_address=192.0.2.200:6379", "sync.backend=shm"],
            "set sync.directory to a folder that all hosts share, or send them over the network (sync.backend=auto on GPUs",
        ),
    ],
)
def test_the_plan_and_the_dry_run_refuse_alike(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from marsrl.trainer.main import main

    words = [*words, "rollout.engines=4"]
    assert cli.main(["plan", "--gpus", "16", *words, "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"] and says in plan["refused"][0]
    assert cli.main(["plan", "--gpus", "16", *words]) == 0
    assert "- refused: " in capsys.readouterr().out
    assert main(["--dry-run", *words]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"marsrl: {plan['refused'][0]} (")
        and ": command line" in said
        and said.count("\nmarsrl: ") == 0
    )
    assert main(["--dry-run", "rollout.engines=4"]) == 0
    assert main(["--dry-run", f"sync.directory={tmp_path}/none"]) == 2
    assert "which is no folder that can be written to: make it" in capsys.readouterr().err


def test_numbers_that_differ_from_the_paper_say_so() -> None:
    """MarsRL's settings at its own size: what is not the paper's carries a comment, and the paper's are there."""
    text = (CONFIGS / "qwen3_30b_a3b.yaml").read_text()
    config, _ = read_config(CONFIGS / "qwen3_30b_a3b.yaml")
    rollout = config.rollout
    assert (rollout.prompts_per_step, rollout.group_size, rollout.picks) == (128, 8, 2)
    assert (rollout.max_response_tokens, rollout.segments, rollout.tokens_per_stage) == (65536, 4, 16384)
    assert config.policies["main"].optimizer.lr == 1e-6 and config.policies["main"].optimizer.decay == "constant"
    assert {a.temperature for a in config.agents.values()} == {0.85} and len(config.agents) == 5
    for key in (
        "engines:",
        "layout:",
        "recompute:",
        "max_tokens_per_micro_batch:",
        "overlap:",
        "correction:",
        "deadline_s:",
        "steps:",
    ):
        (line,) = [line for line in text.splitlines() if key in line.split("#")[0]]
        assert "not the paper's" in line, line


def test_the_head_takes_its_six_thv_flops() -> None:
    # 6 T H V FLOPs at T = 16384 on a GPU that reaches 798 TFLOP/s: 38.3 ms (the roofline in the kernels' design)
    setup = replace(SETUP, layout=Layout(1, 1, 1, 1, 1), world_size=1, tokens=16384)
    gpu = replace(H100, flops=798e12 / hw.HEAD_SHARE.value)
    time = step_time(setup, Work(1, 16384.0, 16384.0), gpu, sweeps_entropy=False)
    assert time.head == pytest.approx(38.3e-3, rel=0.01)
    swept = step_time(setup, Work(1, 16384.0, 16384.0), gpu, sweeps_entropy=True)
    assert swept.head / time.head == pytest.approx((6 + 2 * hw.POSITIVE_SHARE.value) / 6)


def test_time_follows_the_work_and_the_ranks() -> None:
    once = step_time(SETUP, WORK, H100, True)
    twice = step_time(
        SETUP, replace(WORK, sequences=2048, tokens=2 * WORK.tokens, trained=2 * WORK.trained), H100, True
    )
    for name in ("linear", "experts", "attention", "head", "elementwise", "tensor_parallel", "expert_parallel"):
        assert getattr(twice, name) == pytest.approx(2 * getattr(once, name)), name
    assert (twice.optimizer, twice.data_parallel) == (once.optimizer, once.data_parallel)
    more = step_time(replace(SETUP, world_size=64), WORK, H100, True)
    assert more.linear == pytest.approx(once.linear / 2)
    longer = step_time(SETUP, replace(WORK, sequences=WORK.sequences // 2), H100, True)
    assert longer.attention == pytest.approx(2 * once.attention) and longer.linear == once.linear
    assert step_time(replace(SETUP, recompute="none"), WORK, H100, True).linear == pytest.approx(0.75 * once.linear)
    assert step_time(SETUP, WORK, hw.GPUS["a100-80g"], True).total > once.total
    assert once.total == pytest.approx(sum(vars(once).values()))


def test_a_second_pipeline_stage_waits_and_an_expert_group_beyond_a_node_is_slower() -> None:
    piped = step_time(replace(SETUP, layout=Layout(4, 8, 1, 2, 1)), WORK, H100, True)
    assert piped.bubble > 0 and step_time(SETUP, WORK, H100, True).bubble == 0
    inside, across = (step_time(replace(SETUP, layout=Layout(1, ep, 1, 1, 1)), WORK, H100, True) for ep in (8, 16))
    assert across.expert_parallel > 5 * inside.expert_parallel


def test_context_ranks_exchange_keys_and_share_the_rest() -> None:
    whole, cut = (step_time(replace(SETUP, layout=Layout(2, 8, 1, 1, c)), WORK, H100, True) for c in (1, 4))
    for name in ("linear", "experts", "attention", "head"):  # the same ranks do the same work
        assert getattr(cut, name) == pytest.approx(getattr(whole, name)), name
    tokens = WORK.tokens / (32 / (2 * 4))  # of the ranks that share sequences; full recompute gathers once more
    keys = 2 * tokens * 4 * 128 / 2 * 2 * 48
    assert cut.context_parallel == pytest.approx(3 * keys * 3 / 4 / (450e9 * hw.LINK_SHARE.value))
    assert whole.context_parallel == 0
    across = step_time(replace(SETUP, layout=Layout(4, 8, 1, 1, 4)), WORK, H100, True)  # 16 ranks: two nodes
    assert across.context_parallel > 2 * cut.context_parallel


def test_context_parallelism_is_ranked_where_a_sequence_may_be_cut() -> None:
    (policy,) = planned("qwen3_30b_a3b", 64).policies
    contexts = {o.layout.context for o in policy.options}
    assert contexts == {1, 2, 3, 4, 6, 8, 12, 24}
    assert len({(o.layout, o.recompute) for o in policy.options}) == len(policy.options)
    one = {o.layout: o for o in policy.options if o.recompute == "none"}
    for layout, each in one.items():
        if layout.context == 1 and (half := one.get(replace(layout, context=2))):
            assert half.memory.activations < 0.75 * each.memory.activations, layout
    (policy,) = planned("qwen3_30b_a3b", 64, "loss.ratio=sequence").policies
    assert {o.layout.context for o in policy.options} == {1}  # the learner refuses to cut a sequence then


def test_a_kl_term_costs_the_references_weights_and_a_forward_pass() -> None:
    words = ["loss.kl=k3", "loss.kl_coef=0.01", "policies.main.reference=start"]
    plain = planned("qwen3_30b_a3b", 64).policies[0].configured
    plan = planned("qwen3_30b_a3b", 64, *words)
    mine = plan.policies[0].configured
    assert plain is not None and mine is not None and plain.memory.reference == plain.time.scoring == 0
    assert mine.memory.reference == mine.memory.weights == plain.memory.weights
    assert mine.memory.peak == plain.memory.peak + mine.memory.reference
    # forward, of forward, again, backward
    assert 0.15 < mine.time.scoring / (mine.time.total - mine.time.scoring) < 0.35
    small = planned("qwen3_8b", 8, *words[:2], "policies.main.reference=Qwen3-4B").policies[0].configured
    assert small is not None and 0 < small.memory.reference < 0.6 * small.memory.weights
    twice = planned("qwen3_30b_a3b", 64, *words, "loss.old_policy=recompute")
    again = twice.policies[0].configured
    assert again is not None and again.time.scoring == pytest.approx(2 * mine.time.scoring)


def test_replayed_experts_take_the_ranks_memory_and_those_of_decoding_the_first_hosts_too() -> None:
    none, again, decoded = (
        planned("qwen3_30b_a3b", 64, f"trainer.router_replay={replay}").policies[0]
        for replay in ("none", "recompute", "rollout")
    )
    assert none.configured is not None and again.configured is not None and decoded.configured is not None
    record = decoded.work.tokens * 48 * 8  # a byte for each of 8 experts in 48 layers
    of_rank = record / (24 / 4)  # data-parallel ranks
    assert none.configured.memory.replay == none.configured.memory.host == none.host_bytes == 0
    assert decoded.host_bytes == record and decoded.configured.memory.host == 0
    # as packed, a tensor rank's quarter by itself, and two bytes for each eight of that
    assert decoded.configured.memory.replay == pytest.approx(of_rank * (1 + 1 / 4 + 1 / 16), rel=0.01)
    assert again.configured.memory.replay == pytest.approx(of_rank / 16, rel=0.01)
    assert again.host_bytes == 8 * again.configured.memory.host == pytest.approx(8 * of_rank / 4, rel=0.01)


def test_an_optimizer_that_is_not_distributed_is_whole_on_every_rank() -> None:
    whole = most_loaded_rank(replace(SETUP, distributes_optimizer=False))
    assert whole.optimizer == 6 * whole.weights > most_loaded_rank(SETUP).optimizer  # 12 bytes a number beside 2


def test_offloading_moves_the_optimizer_to_the_host_and_costs_time() -> None:
    offloaded = replace(SETUP, offloads_optimizer=True)
    here, there = most_loaded_rank(SETUP), most_loaded_rank(offloaded)
    # and the gradients on their way, in pinned memory, of which PyTorch takes the next power of 2
    assert there.optimizer == 0 and there.host == pytest.approx((12 + 2 * 4) / 12 * here.optimizer)
    assert step_time(offloaded, WORK, H100, True).optimizer > step_time(SETUP, WORK, H100, True).optimizer


def test_layers_inputs_on_the_host_leave_the_gpu_and_cross_pcie_twice() -> None:
    away = replace(SETUP, recompute="full_offload")
    here, there = most_loaded_rank(SETUP), most_loaded_rank(away)
    inputs = 48 * 65536 // 4 * 2048 * 2
    assert here.activations - there.activations == inputs and there.host == 2 * inputs  # pinned
    assert there.working == here.working + inputs // 48  # the one that has come back
    plain, slower = step_time(SETUP, WORK, H100, True), step_time(away, WORK, H100, True)
    tokens = WORK.tokens / 8  # replicas
    assert slower.offloading == pytest.approx(2 * 48 * tokens / 4 * 2048 * 2 / (64e9 * hw.LINK_SHARE.value))
    assert plain.offloading == 0 and slower.total - slower.offloading == pytest.approx(plain.total)


def test_an_attention_that_repeats_bitwise_keeps_gigabytes_of_copies() -> None:
    long = replace(SETUP, tokens=98_304)
    plain, repeated = most_loaded_rank(long), most_loaded_rank(replace(long, deterministic=True))
    copies = 17 * 4 * 98_304 * 8 * 128  # 8 heads of a rank: 17 copies keep 132 multiprocessors at work
    assert copies == pytest.approx(6.8e9, rel=0.01) and repeated.peak > plain.peak
    assert repeated.working == copies + remade_bytes(long)


def test_early_pipeline_stages_hold_more_micro_batches() -> None:
    setup = replace(SETUP, layout=Layout(2, 4, 1, 4, 1))
    batches = setup.num_micro_batches * batch_bytes(setup)
    kept = [rank_memory(setup, stage).activations - batches for stage in range(4)]
    assert kept == sorted(kept, reverse=True) and kept[0] == pytest.approx(4 * kept[3])
    one = replace(setup, num_micro_batches=1)
    assert rank_memory(one, 0).activations - batch_bytes(one) == kept[3]


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


def test_a_cache_of_a_size_of_its_own_is_taken_whatever_the_share_is() -> None:
    own = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304, cache_bytes=4096.0 * 2**20)
    memory = engine_memory(own, H100)
    assert (
        memory.kv_tokens
        == 4096 * 2**20 // (98_304 // 2)
        == engine_memory(replace(own, memory_share=0.5), H100).kv_tokens
    )
    assert memory.taken == memory.weights + memory.workspace + 4096 * 2**20 and not memory.fits  # below one sequence
    assert engine_memory(replace(own, cache_bytes=2.0**34), H100).fits
    assert not engine_memory(replace(own, cache_bytes=2.0**36), H100).fits  # more than the GPU has beside the weights
    plan = planned("qwen3_30b_a3b", 64, "rollout.vllm.kv_cache_mib=90000")
    assert any("kv_cache_mib take 105.1 GiB a GPU of 79.1; lower kv_cache_mib" in note for note in plan.notes)
    words = ["rollout.placement=colocated", "rollout.overlap=0", "rollout.vllm.kv_cache_mib=8192"]
    colocated = [planned("single_gpu", 1, *more).policies[0] for more in (words[:2], words)]
    shared, sized = (each.configured for each in colocated)
    assert shared is not None and sized is not None
    assert sized.needed - sized.memory.peak * 1.05 < shared.needed - shared.memory.peak * 1.05


def test_experts_that_lie_whole_are_as_many_bytes_and_the_busiest_gpu_has_more_of_them_to_read() -> None:
    cut = EngineSetup(MOE, 4, 4, "bfloat16", 0.9, 8, 98_304)
    whole = replace(cut, spreads_experts=True)
    assert whole.experts_of_gpu == 32 and cut.experts_of_gpu == 0
    assert engine_memory(whole, H100).weights == engine_memory(cut, H100).weights
    uneven = replace(cut, shape=replace(MOE, num_experts=126))
    more = engine_memory(replace(uneven, spreads_experts=True), H100).weights - engine_memory(uneven, H100).weights
    assert more == 48 * 3 * 2048 * 768 * 2 * (32 - 126 / 4)  # the fullest of four
    few, many = (decoding(whole, response=1000.0)[0], decoding(cut, response=1000.0)[0])
    assert 1.0 < few / many < hw.IMBALANCE.value
    touched = 1 - (1 - 8 / 128) ** 8
    assert min(1.0, 1.3 * touched) < 1  # so that more is read; what all touch is not read twice
    words = ["rollout.vllm.expert_parallel=true"]
    plan = planned("qwen3_30b_a3b", 64, *words)
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    show(plan, console)
    assert "whole (expert_parallel), 32 of 128 on a GPU; the busiest of 4 reads and" in console.export_text()
    assert all(each.engines.spreads_experts == (each.engines.tensor_parallel > 1) for each in plan.policies[0].splits)


def test_a_publish_is_counted_by_the_way_that_the_backend_goes() -> None:
    setup = EngineSetup(MOE, 10, 4, "bfloat16", 0.9, 256, 98_304)
    memory, model, network = engine_memory(setup, H100), 30_532_122_624 * 2, 50e9 * hw.LINK_SHARE.value
    files, wire, mapped = (sync_time(backend, setup, memory, 24, 64, H100) for backend in ("shm", "nccl", "ipc"))
    assert files.gather == pytest.approx(model / network + model / (64e9 * hw.LINK_SHARE.value))
    assert files.write == pytest.approx(2 * model / hw.HOST_BANDWIDTH.value) and files.send == files.copy == 0
    assert wire.gather == wire.write == wire.load == mapped.gather == mapped.load == 0
    assert wire.send == pytest.approx(40 * memory.weights / 24 / network)  # ranks send more than a shard takes
    assert mapped.send == pytest.approx((40 / 24 + 1) * memory.weights * 23 / 24 / network)  # in one thread both ways
    assert wire.total < 0.1 * files.total and files.links_alone == wire.links_alone
    few = sync_time("nccl", replace(setup, num_engines=2), memory, 24, 64, H100)
    assert few.send == pytest.approx(memory.weights / network)  # bound by the receiver
    near = sync_time("nccl", replace(setup, num_engines=1), memory, 4, 8, H100)
    assert near.send == pytest.approx(memory.weights / (450e9 * hw.LINK_SHARE.value))  # one node: NVLink
    alone = sync_time("ipc", replace(setup, num_engines=1, tensor_parallel=1), memory, 1, 1, H100)
    assert alone.send == 0 < alone.copy  # the rank and the engine share the GPU


@pytest.mark.parametrize(
    ("words", "backend"),
    [
        ([], "nccl"),
        (["rollout.placement=colocated", "rollout.engines=8", "rollout.overlap=0"], "ipc"),
        (["sync.backend=shm"], "shm"),
    ],
)
def test_the_plan_s_publish_is_of_the_backend_that_the_run_takes(words: list[str], backend: str) -> None:
    config = read_config(CONFIGS / "qwen3_8b.yaml", words)[0]
    (policy,) = make_plan(config, 8, "h100-80g").policies
    assert policy.sync.backend == backend == with_backend(config, on_gpus=True).sync.backend


def decoding(setup: EngineSetup, **changes: object) -> tuple[float, float]:
    """(seconds, tokens that are prefilled) of 1024 completions of 20,000 tokens in 4 stages."""
    demand = replace(Demand(1024, 20_000.0, 8, 4, 16_384, overlaps=False), **changes)  # type: ignore[arg-type]
    time = rollout_time(setup, engine_memory(setup, H100), H100, demand)
    return time.seconds, time.prefilled


def test_decoding_is_counted_by_what_it_reads() -> None:
    setup = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304)
    memory = engine_memory(setup, H100)
    short, long = (
        rollout_time(setup, memory, H100, Demand(1024, response, 8, 4, 16_384, False))
        for response in (1000.0, 30_000.0)
    )
    assert short.tokens_per_s_per_engine > long.tokens_per_s_per_engine
    once = rollout_time(setup, memory, H100, Demand(1024, 1000.0, 8, 1, 65_536, False))
    assert once.seconds - once.prefill == pytest.approx(2.063 * (short.seconds - short.prefill), rel=1e-3)
    assert decoding(replace(setup, kv_cache="fp8"))[0] < 0.7 * decoding(setup)[0]  # half the bytes, twice the requests
    by_hand = 48 * 2 * (hw.ALL_REDUCE_S.value + 2 * 48 * 2048 * 2 / 2 / (450e9 * 0.8))  # of a step of 48 requests
    free, slow = (replace(H100, nvlink=nvlink) for nvlink in (1e30, 450e9))
    load = Demand(1024, 20_000.0, 8, 4, 16_384, False)
    fast, real = (rollout_time(replace(setup, max_num_seqs=48), memory, gpu, load) for gpu in (free, slow))
    assert real.concurrency == pytest.approx(44.7, abs=4)  # of the cache, not of max_num_seqs
    of_sums = (1 / real.tokens_per_s_per_engine - 1 / fast.tokens_per_s_per_engine) * real.concurrency
    assert of_sums == pytest.approx((by_hand - 96 * hw.ALL_REDUCE_S.value) * real.concurrency / 48, rel=1e-6)


def test_a_prompt_is_read_once_a_group_and_what_goes_on_again() -> None:
    setup = EngineSetup(MOE, 4, 2, "bfloat16", 0.9, 256, 98_304)
    whole = {"segments": 1, "tokens_per_stage": 65_536}
    alone, grouped = (decoding(setup, group_size=size, **whole)[1] for size in (1, 8))
    assert alone == 1024 * hw.MEAN_PROMPT.value == 8 * grouped
    length = hw.MEAN_PROMPT.value + 20_000 / 2 * hw.LENGTH_SPREAD.value
    again = decoding(setup)[1] - grouped
    assert again == pytest.approx(1024 * (20_000 / 16_384 - 0.5) * length)
    under_way = decoding(setup, overlaps=True)[1] - decoding(setup)[1]  # new weights empty the cache
    assert under_way == pytest.approx(4 * (engine_memory(setup, H100).kv_tokens / length) * length)
    assert decoding(setup, overlaps=True)[0] > decoding(setup)[0]


def test_overlap_takes_the_longer_of_decoding_and_training() -> None:
    assert step_seconds([10.0, 30.0], [20.0, 5.0], [1.0, 2.0], overlap=0) == 58.0
    assert step_seconds([10.0, 30.0], [20.0, 5.0], [1.0, 2.0], overlap=1) == 33.0
    assert step_seconds([10.0], [20.0], [1.0], overlap=2) == 21.0
    turns, beside = planned("qwen3_8b", 8, "rollout.overlap=0"), planned("qwen3_8b", 8)
    (policy,) = beside.policies
    assert turns.step_s is not None and beside.step_s is not None and policy.chosen is not None
    assert beside.step_s == max(policy.rollout.seconds, policy.chosen.time.total) + policy.sync.total
    assert beside.step_s < turns.step_s - 0.9 * min(policy.rollout.seconds, policy.chosen.time.total)
    assert any("at most 3 versions after its first token" in note and "tis" in note for note in beside.notes)
    assert any("set loss.correction=tis" in note for note in planned("qwen3_8b", 8, "loss.correction=none").notes)


def test_the_flagship_s_step_is_below_75_minutes_with_sharded_engines_and_a_cache_in_fp8() -> None:
    plan = planned("qwen3_30b_a3b", 64)
    (policy,) = plan.policies
    best = policy.splits[0]
    assert plan.step_s is not None and plan.step_s == best.step_s  # the preset is the fastest
    assert best.engines.words == "10 x 4, fp8 cache" and best.num_trainers == 24
    assert best.step_s < 60 * 60
    assert [each.step_s for each in policy.splits] == sorted(each.step_s for each in policy.splits)
    exact = next(each for each in policy.splits if each.engines.kv_cache == "auto")
    assert 75 * 60 < exact.step_s < 100 * 60  # without FP8: the cache's bytes bound it
    assert all(each.num_trainers + each.engines.num_gpus == 64 for each in policy.splits)


def test_what_does_not_fit_says_why() -> None:
    plan = planned("qwen3_30b_a3b_8xh100", 8, "policies.main.optimizer.offload=false")
    assert not plan.fits and plan.step_s is None
    assert any("no layout fits on 4 trainer GPUs" in n and "optimizer state" in n for n in plan.notes), plan.notes
    words = ["policies.main.layout.tensor=8", "rollout.vllm.tensor_parallel=1"]
    notes = " ".join(planned("qwen3_30b_a3b", 64, *words, gpu="a100-40g").notes)
    assert "does not divide the 4 key/value heads" in notes and "this would be valid: " in notes
    assert "an engine of policy main does not fit: its weights take 56.9 GiB a GPU" in notes
    with pytest.raises(
        ConfigError, match="max_response_tokens is 32768, but trainer.max_tokens_per_micro_batch is 24576"
    ):
        planned("qwen3_8b", 8, "rollout.max_response_tokens=32768")


def test_the_command_prints_tables_or_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = str(CONFIGS / "qwen3_30b_a3b.yaml")
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--config", config, "--gpus", "64", "--gpu", "h200-141g", "--json", str(out)]) == 0
    assert "64 x h200-141g: 24 train, 40 decode" in capsys.readouterr().out
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


@pytest.mark.parametrize("command", [["plan", "--gpus", "8"], ["evaluate"]])
def test_a_command_replaces_no_file_of_a_run(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = tmp_path / "run" / "checkpoints" / "summary.json"
    summary.parent.mkdir(parents=True)
    for file in (summary, tmp_path / "run" / "config.yaml", tmp_path / "run" / "lock"):
        file.write_text("kept")
    assert cli.main([*command, "--json", str(summary)]) == 2
    assert f"{summary} is a file of the run in {tmp_path / 'run'} and is not replaced" in capsys.readouterr().err
    assert summary.read_text() == "kept"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "64", "--gpu", "tpu"], "--gpu tpu is not known; presets: h100-80g, a100-80g, a100-40g, h200-141g"),
        (["--gpus", "8"], "10 engines x 4 GPUs = 40 GPUs, and --gpus is 8: none is left to train on"),
        (
            ["--gpus", "52", "agents.verifier1.policy=judge", "policies.judge={model: Qwen3-4B, engines: 3}"],
            "10 engines x 4 GPUs + 3 engines x 4 GPUs = 52 GPUs, and --gpus is 52",
        ),
        (["--gpus", "8", "rollout.engines=9"], "or give more (rollout.engines: command line)"),
        (
            ["--gpus", "64", "policies.main.model=Llama-7B"],
            "Llama-7B is none of the models whose shape is known: Qwen3-30B",
        ),
        (["--gpus", "64", "rollout.segmnts=2"], "did you mean rollout.segments?"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", str(CONFIGS / "qwen3_30b_a3b.yaml"), *words]) == 2
    assert says in capsys.readouterr().err


def test_the_engines_of_two_policies_share_gpus_by_their_load() -> None:
    own = "model: Qwen3-8B, dtype: bfloat16, layout: {tensor: 2}, recompute: full"
    other = own.replace("Qwen3-8B", "Qwen3-4B")
    words = [
        f"policies={{solver: {{{own}, engines: 5}}, verifier: {{{other}, engines: 3}}}}",
        "agents.solver.policy=solver",
        "agents.verifier.policy=verifier",
    ]
    near = planned("drmas_math", 16, *words)
    assert any("share 8 GPUs, solver 5, verifier 3" in note and "no other split" in note for note in near.notes)
    words[0] = words[0].replace("engines: 5", "engines: 1").replace("engines: 3", "engines: 7")
    far = planned("drmas_math", 16, *words)
    (note,) = (note for note in far.notes if "share 8 GPUs, solver 1, verifier 7" in note)
    found = re.search(r"in (\d+) s; solver (\d), verifier (\d) would take (\d+) s", note)
    assert found is not None
    before, solver, verifier, after = map(int, found.groups())
    assert solver + verifier == 8 and solver > verifier and after < before / 2
    alone = max(policy.rollout.seconds for policy in near.policies)
    assert after <= round(alone)  # no worse than by hand
    one = planned("drmas_math", 8)
    assert not any("share" in note and "engines" in note for note in one.notes)
