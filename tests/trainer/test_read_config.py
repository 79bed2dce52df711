"""What settings result in, and which are refused, also for policies with adapters."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml

from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.checks.refusals import stale_samples
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError, read_config


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(None, words)
    return str(caught.value)


JUDGE = "agents.verifier1.policy=judge"
# FROZEN: a frozen policy behind HTTP plays the Verifiers. TEACHER: an agent has a teacher. JUDGING: a model judges.
FROZEN = (
    "policies.main={}",
    "credit.train_agents=[solver, corrector1, corrector2]",
    JUDGE,
    "agents.verifier2.policy=judge",
    "policies.judge={frozen: true, engine: openai, model: x, openai: {base_url: 'http://h/v1', model: m}}",
)
CHAT = (*FROZEN, "policies.judge.model=null", "policies.judge.openai.api=chat")
MATH = ("task=math", "orchestration=solver", "data.train=p.jsonl", "policies.main.model=x")
TEACHER = (*MATH, "policies.big={frozen: true, model: x}", "agents.solver.teacher.policy=big")
JUDGING = (*MATH, "policies.judge={frozen: true, model: x}", "judge={policy: judge, when: always}")
FP8 = (
    "policies.main={model: /m, dtype: bfloat16}",
    "rollout.vllm={dtype: bfloat16, quantization: fp8}",
    "loss={correction: tis, old_policy: pois}",
)
TEAM = ("orchestration=solver_verifier", "agents.verifier.policy=checker")
MAIN = "policies.main={model: /m, layout: {tensor: 2}, recompute: full}"
CHECKER = "policies.checker={base: main, adapter: {}}"
BASED = (*TEAM, MAIN, "policies.main.adapter={}", CHECKER)
BARE = (*TEAM, MAIN, CHECKER, "credit.train_agents=[verifier]")
SHARED = ("trainer.shared_prefixes=auto",)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rollout.segmnts=2"], "rollout.segmnts: unknown key; did you mean rollout.segments?"),
        (["agents.solver.temprature=1"], "did you mean agents.solver.temperature?"),
        (["policies.main.optimizer.lrr=1"], "did you mean policies.main.optimizer.lr?"),
        (["group_size=8"], "did you mean rollout.group_size?"),
        (["model=/m"], "model: unknown key; did you mean policies.<name>.model or policies.<name>.openai.model?"),
        (["agents.solver.max_tokens=9"], "did you mean agents.solver.max_response_tokens?"),
        (["policies.main.learning_rate=1"], "did you mean policies.main.optimizer.lr?"),
        (["mpt.xyzzy=1"], "keys of mpt: scope, probability, entropy"),
        (["run.steps=many"], "(found 'many')"),
        (["mpt.temperature=0.7"], "mpt.temperature: "),
        (["fast"], "'fast' is not a setting"),
        (["task=mathh"], "'mathh' is unknown; expected arithmetic, math"),
        (["rollout.group_size=1000000000000"], "rollout.group_size: Input should be"),
        (["run.seed=4294967296"], "run.seed: Input should be"),
        (["rollout.prompts_per_step=100000", "rollout.group_size=1000"],
         "rollout.prompts_per_step x rollout.group_size x rollout.picks = 100,000 x 1,000 x 2 samples"),
        (["agents.solver.policy=big"], "agents.solver.policy is 'big'; expected a name under `policies` (main)"),
        (["agents.solver.max_response_tokens=65", "rollout.max_response_tokens=64"],
         "above rollout.max_response_tokens = 64; raise rollout.max_response_tokens"),
        ([JUDGE, "policies.judge.engines=2", "rollout.placement=colocated"],
         "policies.judge.engines is 2, but rollout.placement=colocated puts one engine of every policy"),
        ([JUDGE, "policies.judge.vllm.max_num_seqs=0"], "policies.judge.vllm.max_num_seqs: Input should be greater than 0"),
        (["rollout.vllm.expert_parallel=true"], "vllm.tensor_parallel is 1; raise it, or set expert_parallel=false"),
        ([JUDGE, "policies.judge.vllm.kv_cache=1"], "policies.judge.vllm.kv_cache: unknown key; did you mean "),
        ([*FROZEN, "policies.judge.engines=2"],
         "policies.judge.engines is set, but policies.judge.engine=openai starts no engines"),
        (["sync.backend=nccl", "rollout.placement=local"], "rollout.placement=local has one"),
        (["sync.backend=nccl", "rollout.placement=colocated"], "NCCL does not support two processes on one GPU"),
        (["sync.backend=ipc"], "works between processes on one GPU; set sync.backend=nccl"),
        (["sync.backend=nccl", "sync.directory=/x"], "writes no files"),
        (["rollout.ray_address=here:0"], "expected here or here:PORT, with a port from 1 to 65535"),
        (["run.name=001"], """(found 1; quote text, twice in a shell: run.name="'...'")"""),
        (["agents.solver.suffix=Answer: 4"], "(found {'Answer': 4}; quote text, twice in a shell: "),
        (['agents.solver.suffix="In \\boxed{}"'], "agents.solver.suffix contains the control character '\\x08': YAML reads"),
        (["credit.train_agents=solvr"], "credit.train_agents names 'solvr'; the agents are solver, "),
        (["credit.balance=uniform"], "set rollout.pipeline=trajectory, or credit.normalise=agent"),
        (["loss.kl=k3", "loss.kl_coef=0.1"], "loss.kl=k3 needs a reference, but policies.main.reference is none"),
        (["policies.main.reference=past", "loss.kl=k3"],
         "policies.main.reference is past, but policies.main.reference_every is not set; set both"),
        (["policies.main.reference_every=2"], "policies.main.reference is none, but policies.main.reference_every is 2;"),
        (["policies.main.reference=past", "policies.main.reference_every=2"],
         "policies.main.reference is past, but loss.kl is none;"),
        (["policies.main.reference_every=0"], "policies.main.reference_every: Input should be greater than 0"),
        (["league={policy: mian}"], "league.policy is 'mian'; expected a name under `policies` (main)"),
        (["league.policy=main"],
         "league.policy is main, which has no adapter, but a league loads past adapters beside the current one; set policies"),
        (["league.policy=main", "policies.main.adapter={}", "orchestration=solver"],
         "league.policy is main, the policy of solver; expected exactly two agents, which play each other"),
        (["league.policy=main", "policies.main.adapter={}"],
         "the policy of solver, verifier1, corrector1, verifier2, corrector2; expected exactly two agents"),
        (["league.policy=main", "policies.main.adapter={}", "orchestration=solver_verifier", "run.evaluate=false"],
         "league is set, but there are no evaluations (run.evaluate is false, run.eval_every 0); set run.eval_every"),
        (["loss.kl_coef=0.1"], "loss.kl_coef is 0.1 but loss.kl is none"),
        (["loss.kl_in=reward"], "loss.kl_in is reward but loss.kl_coef is 0"),
        (["loss.clip_low=1.5"], "loss.clip_low: Input should be less than or equal to 1"),
        (["agents.solver.clip_low=1.5"], "agents.solver.clip_low: Input should be less than or equal to 1"),
        (["loss.dual_clip=1.2"], "loss.dual_clip is 1.2, but the largest clip_high is 0.2; set loss.dual_clip above 1.2"),
        (["loss.dual_clip=3", "agents.solver.clip_high=2"], "but the largest clip_high is 2; set loss.dual_clip above 3"),
        (
            ["agents.solver.max_response_tokens=32", "agents.solver.overlong.buffer=33"],
            "agents.solver.overlong.buffer is 33, above the agent's max_response_tokens = 32; lower the buffer",
        ),
        (["agents.solver.overlong.penalty=1"], "agents.solver.overlong.buffer"),
        (["loss.correction=icepop", "loss.correction_low=6"], "correction_low is 6, above loss.correction_high = 5"),
        (["policies.main.optimizer={offload: true, distributed: false}"],
         "optimizer.offload needs optimizer.distributed; set distributed=true"),
        (["policies.main.optimizer.betas=[0.9, 1]"], "policies.main.optimizer.betas.1: Input should be less than 1"),
        (["policies={a/b: {model: x}}"], "policies.a/b.[key]: String should match pattern"),
        (["credit.normalise=trajectory"],
         "but orchestration=verifier_corrector plays one per problem; set credit.normalise=group or global"),
        (["mpt.scope=batch", "agents.corrector1.clip_high=0.3"],
         "agents.corrector1.clip_low and agents.corrector1.clip_high are None and 0.3, but mpt.scope=batch"),
        (["agents.solver.top_p=0.9"], "top_p and agents.solver.top_k are 0.9 and -1, but a trained agent needs 1 and -1"),
        (["agents.solver.top_k=5"], "set those, or loss.truncation=renormalise, or remove the agent"),
        (["agents.corrector2.top_k=50", "loss.truncation=renormalise", "loss.max_support=40"],
         "agents.corrector2.top_k is 50, above loss.max_support = 40, "),
        (["credit.train_agents=[]"], "credit.train_agents is empty; expected at least one agent: "),
        (["rollout.stage_size=total", "rollout.segments=4", "rollout.pipeline=trajectory"],
         "rollout.pipeline=trajectory carries none"),
        ([*FROZEN, "policies.judge.frozen=false"], "cannot be trained, because the server returns no token ids or log-probs"),
        ([*FROZEN, "credit.train_agents=all"],
         "agents.verifier1 is trained, but its policy judge is frozen and served by"),
        ([*FROZEN, "policies.judge.openai=null"], "policies.judge: found engine=openai without a section openai; "),
        ([*FROZEN, "policies.judge.model=null"], "policies.judge: a frozen policy needs `model`"),
        ([*CHAT, "policies.judge.model=x"], "policies.judge.openai.api is chat, where the server renders chats, but"),
        ([*CHAT, "policies.judge.openai.prompt=tokens"], "takes messages, but prompt is tokens; remove prompt"),
        ([*CHAT, "agents.verifier2.template_options={enable_thinking: false}"],
         "set policies.judge.openai.extra_body={chat_template_kwargs: {...}}"),
        ([*CHAT, "rollout.segments=2"], "cannot continue a partial answer, but rollout.segments is 2"),
        ([*CHAT, "policies.judge.frozen=false"], "cannot be trained, because the server returns no token ids or log-probs"),
        ([*TEACHER, "policies.big.frozen=false"], "agents.solver.teacher.policy is 'big', which is trained"),
        ([*TEACHER, "agents.solver.policy=big"], "agents.solver is trained, but its policy big is frozen"),
        ([*TEACHER, "judge={policy: big}"], "whose engines also serve the judge"),
        ([*TEACHER, "policies.other={base: big, adapter: {rank: 2}}", "agents.solver.policy=other"],
         "agents.solver.teacher.policy is 'big', whose engines also serve agents.solver"),
        ([*JUDGING, "judge.policy=other"], "judge.policy is 'other'; expected a name under `policies` (main, judge)"),
        ([*JUDGING, "policies.judge.frozen=false"], "judge.policy is 'judge', which is trained"),
        ([*JUDGING, "rollout.engine=vllm", "rollout.placement=local", "rollout.overlap=1"],
         "with rollout.overlap=1 it judges while other engines decode, but two vLLM engines"),
        (["loss.old_policy=sais", "loss.correction=tis"], "loss.correction=tis has no effect with loss.old_policy=sais"),
        (["policies.main={shape: tiny, model: /m}"], "policies.main.shape is tiny, the size of a warm-started policy, but"),
        ([*FROZEN, "policies.judge.openai.base_url=file:///etc/passwd"], "expected http"),
        ([*FROZEN, "policies.judge.openai.base_url=localhost:8000"], "expected http"),
        ([*FROZEN, "policies.judge.openai.base_url=https://user:sk-1@host/v1"], "would be saved with the config"),
        ([*FROZEN, "policies.judge.openai.api_key_env=sk-1-2"], "not the name of an environment variable"),
        ([*FP8, "loss.correction=none"], "loss.correction=none ignores that quantised weights sample the tokens"),
        ([*FP8, "sync.delta=true"], "keep no unrounded weights that changes could be applied to; set sync.delta=false"),
        ([*FP8, "policies.main.adapter={}"], "needs the trainer's unquantised base; set quantization to null"),
        ([*FP8, "policies.main.dtype=float32", "rollout.vllm.dtype=null"],
         "supports fp8 only with 16-bit activations; set rollout.vllm.dtype=bfloat16"),
        ([*BASED, "policies.checker.base=other"],
         "policies.checker.base is other; expected the name of another policy: main"),
        ([*BASED, "policies.checker.adapter=null"],
         "policies.checker.adapter is not set; set it"),
        ([*BASED, "policies.checker.frozen=true"], "policies.checker.frozen is true"),
        ([*BASED, "policies.checker.model=/own"], "policies.checker.model is /own"),
        ([*BASED, "policies.checker.dtype=bfloat16"], "policies.checker.dtype is bfloat16, but its base has"),
        ([*BASED, "policies.checker.layout={tensor: 1}"], "policies.checker.layout is"),
        ([*BASED, "policies.checker.router_aux_loss=0.1"], "policies.checker.router_aux_loss is 0.1"),
        ([*SHARED, "policies.main.layout.context=2"],
         "trainer.shared_prefixes is auto, but policies.main.layout.context is 2"),
        ([*SHARED, "policies.main.router_aux_loss=0.1"], "policies.main.router_aux_loss is 0.1, a loss over the tokens"),
        (["trainer.shared_prefixes=on", "policies.main.deterministic=true"],
         "trainer.shared_prefixes is on, but policies.main.deterministic is true"),
        ([*BARE, "credit.train_agents=all"], "its policy main is the frozen base of checker"),
        ([*BARE, "policies.main={frozen: true, engine: openai, openai: {base_url: 'http://h/v1', model: m}}"],
         "policies.checker.base is main, which a server serves"),
        ([*BARE, "policies.third={base: checker, adapter: {}}"],
         "policies.third.base is checker, which itself has base main; name main instead"),
        ([*BARE, "agents.solver.policy=checker", "policies.main.frozen=true", "judge={policy: main}"],
         "judge.policy is 'main', whose engines also serve agents.solver"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_with_reason_and_origin(words: list[str], says: str) -> None:
    said = refusal(*words)
    assert says in said and "command line" in said


def test_prompts_of_a_chat_server_have_four_bytes_a_token() -> None:
    config, _ = read_config(None, [*CHAT, "judge={policy: judge}", "agents.solver.max_input_tokens=100"])
    assert config.policies["judge"].directory is not None and config.policies["main"].directory is None
    counted = config.in_bytes()
    assert counted.judge is not None and counted.judge.max_input_tokens == 4 * 8192
    assert [counted.agents[name].max_input_tokens for name in ("solver", "verifier1")] == [100, 4 * 256]


RENORMALISED = ("agents.solver.top_p=0.9", "agents.corrector2.top_k=50", "loss.truncation=renormalise")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["run.steps=3", "run.steps=4", "run.eval_every=${run.steps}"], "run.eval_every", 4),
        (["mpt.scope=off"], "mpt.scope", "off"),  # text, not YAML's false
        (["run.resume=off"], "run.resume", "off"),
        (["trainer.shared_prefixes=off"], "trainer.shared_prefixes", "off"),
        (["trainer.shared_prefixes=on"], "trainer.shared_prefixes", "on"),
        ([], "mpt.temperature", "sampling"),
        (["mpt.temperature=1"], "mpt.temperature", 1),
        (["credit.train_agents=solver"], "credit.train_agents", ("solver",)),
        (["credit.train_agents=all"], "credit.train_agents", "all"),
        (["credit.balance=uniform", "credit.normalise=agent"], "credit.balance", "uniform"),
        (["rollout.stage_size=total", "rollout.segments=4"], "rollout.stage_size", "total"),
        # These settings are refused only for trained agents.
        (["mpt.scope=batch", "agents.corrector1.clip_high=0.3", "credit.train_agents=[corrector1]"], "mpt.scope", "batch"),
        (["agents.solver.top_p=0.9", "credit.train_agents=[verifier1]"], "max_kept", {}),
        (["loss.kl=k3", "loss.kl_coef=0.1", "policies.main.reference=start"], "loss.kl", "k3"),
        # For trained agents, an engine records which tokens top_p and top_k kept, and needs memory for them.
        ([*RENORMALISED], "max_kept", {"solver": 1024, "corrector2": 1024}),
        ([*RENORMALISED, "credit.train_agents=solver"], "max_kept", {"solver": 1024}),
        (["loss.truncation=renormalise"], "max_kept", {}),
        (["run.dir=~/runs"], "run.dir", str(Path.home() / "runs")),
        (["loss.correction=tis"], "loss.upper_bound", 2),
        (["loss.correction=sequence_mask"], "loss.upper_bound", 2),
        (["loss.correction=icepop"], "loss.upper_bound", 5),
        (["loss.correction=icepop", "loss.correction_high=3"], "loss.upper_bound", 3),
        # Credit over an instance needs whole instances.
        ([], "has_whole_instances", False),
        (["rollout.pipeline=trajectory"], "has_whole_instances", True),
        (["rollout.pipeline=trajectory"], "trains_whole", False),
        (["credit.normalise=agent"], "trains_whole", True),
        (["credit.normalise=step"], "trains_whole", False),
        (["credit.reward_scheme=outcome"], "trains_whole", True),
        (["credit.normalise=trajectory", "orchestration=solver_verifier"], "trains_whole", True),
        # a ratio to the engine's log-probs needs no correction, nor does a frozen policy
        ([*FP8, "loss={correction: none, old_policy: sais}"], "loss.correction", "none"),
        ([*FP8, "rollout.vllm.quantization=null", "policies.judge={frozen: true, model: /m, dtype: bfloat16}",
          "policies.judge.vllm.quantization=fp8", "sync.delta=true"], "sync.delta", True),
        ([*FP8, "sync.backend=nccl"], "sync.backend", "nccl"),
    ],
)  # fmt: skip
def test_words_are_read_as_settings(words: list[str], key: str, value: object) -> None:
    assert attrgetter(key)(read_config(None, words)[0]) == value


def test_a_policy_has_engines_of_its_own_over_those_of_all() -> None:
    words = [JUDGE, "rollout.engines=2", "rollout.vllm.max_num_seqs=64", "rollout.engine=vllm"]
    words += ["policies.judge.engines=3", "policies.judge.vllm={kv_cache_mib: 512, dtype: bfloat16}"]
    config, _ = read_config(None, words)
    main, judge = config.served_rollouts.values()
    assert (main.engines, judge.engines) == (2, 3) and main == config.rollout
    assert main.vllm.kv_cache_mib == 256 and judge.vllm.kv_cache_mib == 512  # 256 is the preset's value
    assert judge.vllm.max_num_seqs == 64 and config.engine_dtype("judge") == "bfloat16"
    assert config.engine_dtype("main") == "float32"
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config


def test_all_problems_are_reported_at_once() -> None:
    assert len(refusal("run.steps=many", "rollout.segmnts=2").splitlines()) == 2
    all_frozen = refusal(*FROZEN, "policies.main.frozen=true", "policies.main.model=x")
    assert all_frozen == "policies: all are frozen (main, judge); expected at least one to train: unfreeze one"


@pytest.mark.parametrize(
    ("words", "placement"),
    [
        ([], "disaggregated"),
        (["rollout.engine=local"], "local"),
        (["rollout.engine=local", "rollout.placement=disaggregated"], "disaggregated"),
        (["rollout.engine=local", "rollout.engines=2"], "disaggregated"),
        (["rollout.engine=local", "rollout.overlap=1"], "disaggregated"),
        (["rollout.engine=local", "rollout.ray_address=here"], "disaggregated"),
    ],
)
def test_one_engine_of_our_own_needs_no_ray(words: list[str], placement: str) -> None:
    assert read_config(None, words)[0].rollout.placement == placement


def test_a_missing_file_lists_the_presets() -> None:
    with pytest.raises(ConfigError, match="--config .: is a directory; name a YAML file in it"):
        read_config(".")
    with pytest.raises(ConfigError, match="no such file or preset; presets: .*cpu_default, .*qwen3_8b"):
        read_config("nowhere.yaml")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("backend", "placement"), [("nccl", "disaggregated"), ("ipc", "colocated")])
def test_without_cuda_nccl_and_ipc_need_their_cpu_twin(backend: str, placement: str) -> None:
    words = [f"sync.backend={backend}", "rollout.engine=local", f"rollout.placement={placement}"]
    with pytest.raises(ConfigError, match=rf"sync\.backend={backend} needs CUDA, .* or sync\.cpu_twin=true"):
        preflight(read_config(None, words)[0], world_size=1)
    assert preflight(read_config(None, [*words, "sync.cpu_twin=true"])[0], world_size=1).config.sync.cpu_twin
    with pytest.raises(ConfigError, match="vLLM on a CPU computes with packed copies"):
        preflight(read_config(None, [words[0], "sync.cpu_twin=true", "rollout.engine=vllm"])[0], world_size=1)
    deltas = read_config(None, [*words, "sync.cpu_twin=true", "sync.delta=true"])[0]
    if backend == "nccl":
        assert preflight(deltas, world_size=1).placement[-1].endswith("straight to the engines, only changes")
    else:
        with pytest.raises(ConfigError, match="sends changes over a network, and sync.backend=ipc uses none"):
            preflight(deltas, world_size=1)


def test_all_trained_policies_need_the_same_layout() -> None:
    words = ["policies.second={shape: tiny}", "agents.verifier1.policy=second"]
    preflight(read_config(None, [*words, "policies.second.layout.expert_tensor=1"])[0], world_size=1)  # the default
    with pytest.raises(
        ConfigError, match=r"policies.second.layout differs from policies.main.layout, .* set the same layout for all"
    ):
        preflight(read_config(None, [*words, "policies.second.layout.tensor=2"])[0], world_size=2)


def test_a_gate_by_the_whole_batch_needs_room_for_it() -> None:
    words = ["mpt.scope=batch", "trainer.max_tokens_per_micro_batch=8064", "trainer.updates_per_step=2"]
    preflight(read_config(None, words)[0], world_size=2)  # 576 samples of 56 tokens
    with pytest.raises(ConfigError, match=r"mpt.scope=batch needs .* 16,128 tokens: raise .*, 8,064 now"):
        preflight(read_config(None, words)[0], world_size=1)


def test_a_team_is_evaluated_whatever_its_trainer_s_layout_is() -> None:
    config, _ = read_config(None, ["policies.main.layout.tensor=2"], trains=False)
    assert preflight(config, world_size=1, trains=False).plan[-1].startswith("1 rank(s), 1 data-parallel; ")


def test_a_prompt_length_that_does_not_fit_is_warned_about() -> None:
    words = ["orchestration=solver_verifier", "agents.verifier.max_input_tokens=5000"]
    checked = preflight(read_config(None, words)[0], world_size=1)
    # Only the Verifier's length was set, so there is a single warning.
    (message,) = (warning for warning in checked.warnings if "max_input_tokens" in warning)
    given = checked.config.agents["verifier"].max_input_tokens
    assert given + checked.config.rollout.max_response_tokens == 1024  # number of positions of the policy's model
    assert message.startswith(f"agents.verifier.max_input_tokens is 5000, lowered to {given}: the model's positions")


@pytest.mark.parametrize(
    ("words", "causes", "versions"),
    [
        (["rollout.overlap=1", "rollout.segments=4"], "rollout.overlap=1 and rollout.segments=4: ", "5 versions"),
        (["rollout.segments=2"], "rollout.segments=2: ", "1 version"),
        (["rollout.overlap=1", "loss.old_policy=recompute"], "rollout.overlap=1: ", "2 versions"),
        (
            ["credit.normalise=agent"],
            "rollout.pipeline=agentic with credit over all of a problem's samples: ",
            "4 versions",
        ),
    ],
)
def test_old_samples_that_nothing_corrects_are_warned_of(words: list[str], causes: str, versions: str) -> None:
    (said,) = (each for each in preflight(read_config(None, words)[0], 1).warnings if "loss.correction" in each)
    assert said.startswith(f"{causes}a token can be about {versions} old when it is trained")
    for better in ("loss.correction=tis", "loss.old_policy=sais"):
        assert not stale_samples(read_config(None, [*words, better])[0])


def test_on_policy_samples_are_not_warned_about() -> None:
    for words in ([], ["rollout.pipeline=trajectory", "rollout.segments=4", "credit.normalise=agent"]):
        assert not stale_samples(read_config(None, words)[0])
    for preset in (Path(__file__).parents[2] / "configs").glob("*.yaml"):
        assert not stale_samples(read_config(str(preset), [])[0]), preset


def test_a_policy_on_a_base_has_its_model_and_layout() -> None:
    words = [*BASED, "policies.checker={adapter: {rank: 8}, optimizer: {lr: 1.0e-4}}"]
    config = read_config(None, words)[0]
    main, checker = config.policies["main"], config.policies["checker"]
    assert (checker.model, checker.dtype, checker.recompute) == ("/m", "float32", "full")
    assert checker.layout == main.layout and main.layout.tensor == 2
    assert (checker.optimizer.lr, main.optimizer.lr) == (1e-4, 6e-4)
    assert list(config.trained_policies) == ["main", "checker"]
    again = RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json"))))
    assert again == config


def test_bases_stay_even_if_only_a_preset_names_them() -> None:
    for is_frozen in ("false", "true"):
        config, _ = read_config(None, [*BARE, f"policies.main.frozen={is_frozen}"])
        assert list(config.trained_policies) == ["checker"]
    found, _ = read_config(None, ["preset=cpu_adapters"])
    assert list(found.trained_policies) == ["solver", "verifier1", "corrector1", "verifier2", "corrector2"]
    assert {found.policies[name].base for name in found.trained_policies} == {"main"}
