"""`marsrl plan`: formulas against numbers known from elsewhere, every config of the repository, and the refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from marsrl.trainer import cli
from marsrl.trainer.learner.megatron.layout import Layout
from marsrl.trainer.plan import hardware as hw
from marsrl.trainer.plan.command import show
from marsrl.trainer.plan.engines import EngineSetup, engine_memory, kv_bytes_per_token, rollout_time
from marsrl.trainer.plan.memory import Training, batch_bytes, most_loaded_rank, rank_memory
from marsrl.trainer.plan.models import KNOWN
from marsrl.trainer.plan.plan import make_plan
from marsrl.trainer.plan.speed import Work, step_time
from marsrl.trainer.read_config import CONFIGS, read_config

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
            make_plan(read_config(CONFIGS / f"{preset}.yaml")[0], 8, "h100-80g")


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
    assert said.startswith(f"marsrl: {plan['refused'][0]} (") and ": command line" in said and said.count("\n") == 1
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
    config, _ = read_config(CONFIGS / "qwen3_30b_a3b.yaml")
    (policy,) = make_plan(config, 64, "h100-80g").policies
    contexts = {o.layout.context for o in policy.options}
    assert contexts == {1, 2, 3, 4, 6, 8, 12, 24}
    assert len({(o.layout, o.recompute) for o in policy.options}) == len(policy.options)
    one = {o.layout: o for o in policy.options if o.recompute == "none"}
    for layout, each in one.items():
        if layout.context == 1 and (half := one.get(replace(layout, context=2))):
            assert half.memory.activations < 0.75 * each.memory.activations, layout
    config, _ = read_config(CONFIGS / "qwen3_30b_a3b.yaml", ["loss.ratio=sequence"])
    (policy,) = make_plan(config, 64, "h100-80g").policies
    assert {o.layout.context for o in policy.options} == {1}  # the learner refuses to cut a sequence then


def test_a_kl_term_costs_the_references_weights_and_a_forward_pass() -> None:
    words = ["loss.kl=k3", "loss.kl_coef=0.01", "policies.main.reference=start"]
    plain = make_plan(read_config(CONFIGS / "qwen3_30b_a3b.yaml")[0], 64, "h100-80g").policies[0].configured
    plan = make_plan(read_config(CONFIGS / "qwen3_30b_a3b.yaml", words)[0], 64, "h100-80g")
    mine = plan.policies[0].configured
    assert plain is not None and mine is not None and plain.memory.reference == plain.time.scoring == 0
    assert mine.memory.reference == mine.memory.weights == plain.memory.weights
    assert mine.memory.peak == plain.memory.peak + mine.memory.reference
    assert (
        0.15 < mine.time.scoring / (mine.time.total - mine.time.scoring) < 0.35
    )  # forward, of forward, again, backward
    other = read_config(CONFIGS / "qwen3_8b.yaml", [*words[:2], "policies.main.reference=Qwen3-4B"])[0]
    small = make_plan(other, 8, "h100-80g").policies[0].configured
    assert small is not None and 0 < small.memory.reference < 0.6 * small.memory.weights
    twice = make_plan(
        read_config(CONFIGS / "qwen3_30b_a3b.yaml", [*words, "loss.old_policy=recompute"])[0], 64, "h100-80g"
    )
    again = twice.policies[0].configured
    assert again is not None and again.time.scoring == pytest.approx(2 * mine.time.scoring)


def test_an_optimizer_that_is_not_distributed_is_whole_on_every_rank() -> None:
    whole = most_loaded_rank(replace(SETUP, distributes_optimizer=False))
    assert whole.optimizer == 6 * whole.weights > most_loaded_rank(SETUP).optimizer  # 12 bytes a number beside 2


def test_offloading_moves_the_optimizer_to_the_host_and_costs_time() -> None:
    offloaded = replace(SETUP, offloads_optimizer=True)
    here, there = most_loaded_rank(SETUP), most_loaded_rank(offloaded)
    assert there.optimizer == 0 and there.host == 4 / 3 * here.optimizer > 0  # and the gradients on their way
    assert step_time(offloaded, WORK, H100, True).optimizer > step_time(SETUP, WORK, H100, True).optimizer


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
    assert memory.weights == 30_532_122_624
    assert memory.kv_tokens * 98_304 / 2 == pytest.approx(memory.kv_cache, rel=1e-4)
    short, long = (rollout_time(setup, memory, H100, 1024, response, 4) for response in (1000.0, 30_000.0))
    assert short.tokens_per_s_per_engine > long.tokens_per_s_per_engine
    assert rollout_time(setup, memory, H100, 1024, 1000.0, 1).seconds == pytest.approx(2.063 * short.seconds, rel=1e-3)
    assert engine_memory(replace(setup, tensor_parallel=1), hw.GPUS["a100-40g"]).kv_tokens == 0


def test_what_does_not_fit_says_why() -> None:
    config, _ = read_config(CONFIGS / "qwen3_30b_a3b_8xh100.yaml", ["policies.main.optimizer.offload=false"])
    plan = make_plan(config, 8, "h100-80g")
    assert not plan.fits and plan.step_s is None
    assert any("no layout fits on 4 trainer GPUs" in n and "optimizer state" in n for n in plan.notes), plan.notes
    words = ["policies.main.layout.tensor=8", "rollout.vllm.tensor_parallel=1"]
    config, _ = read_config(CONFIGS / "qwen3_30b_a3b.yaml", words)
    notes = " ".join(make_plan(config, 64, "a100-40g").notes)
    assert "does not divide the 4 key/value heads" in notes and "this would be valid: " in notes
    assert "an engine of policy main does not fit: its weights take 56.9 GiB a GPU" in notes
    config, _ = read_config(CONFIGS / "qwen3_8b.yaml", ["rollout.max_response_tokens=32768"])
    assert (
        "can have 40,960 tokens (prompt and completion): such a batch would be refused"
        in make_plan(config, 8, "h100-80g").notes[-1]
    )


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
    near = make_plan(read_config(CONFIGS / "drmas_math.yaml", words)[0], 16, "h100-80g")
    assert any("share 8 GPUs, solver 5, verifier 3" in note and "no other split" in note for note in near.notes)
    words[0] = words[0].replace("engines: 5", "engines: 1").replace("engines: 3", "engines: 7")
    far = make_plan(read_config(CONFIGS / "drmas_math.yaml", words)[0], 16, "h100-80g")
    (note,) = (note for note in far.notes if "share 8 GPUs, solver 1, verifier 7" in note)
    found = re.search(r"in (\d+) s; solver (\d), verifier (\d) would take (\d+) s", note)
    assert found is not None
    before, solver, verifier, after = map(int, found.groups())
    assert solver + verifier == 8 and solver > verifier and after < before / 2
    alone = max(policy.rollout.seconds for policy in near.policies)
    assert after <= round(alone)  # no worse than by hand
    one = make_plan(read_config(CONFIGS / "drmas_math.yaml")[0], 8, "h100-80g")
    assert not any("share" in note and "engines" in note for note in one.notes)
