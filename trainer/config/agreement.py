"""Rules between sections of a config. Each raises ValueError with the keys, the values found and the values expected."""

from __future__ import annotations

from collections.abc import Sequence

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, RolloutConfig, TeacherConfig
from marsrl.rollout.orchestrations.registry import find_orchestration
from marsrl.rollout.tools.config import how_to_set
from marsrl.trainer.config.policy import PolicyConfig
from marsrl.trainer.config.run_config import RunConfig
from marsrl.trainer.config.sections import SyncConfig


def check_agreement(config: RunConfig, *, trains: bool) -> None:
    """Raise ValueError if sections that are valid on their own contradict each other.

    trains: False for commands that train nothing; all policies may then be frozen.
    """
    _check_data(config)
    for name, policy in config.policies.items():
        _check_policy(config, name, policy)
    if not config.trained_policies and trains:
        raise ValueError(
            f"policies: all are frozen ({', '.join(config.policies)}); expected at least one to train: unfreeze one"
        )
    for name, agent in config.agents.items():
        _check_agent(config, name, agent, is_trained=trains and config.credit.trains(name))
        if agent.teacher is not None and trains:
            _check_teacher(config, name, agent.teacher)
    _check_tools(config)
    _check_external(config)
    if config.judge is not None:
        _check_apart(config, "judge.policy", config.judge.policy, "judges")
    _check_sync(config.sync, config.rollout)
    for name in config.policies if config.rollout.engine == "vllm" else ():
        if config.rollout_of(name).vllm.quantization is not None:
            _check_quantised(config, name, is_trained=trains and name in config.trained_policies)
    _check_credit(config)


def _check_data(config: RunConfig) -> None:
    """Refuse problem files for a task that generates its problems."""
    given = [key for key in ("train", "eval") if getattr(config.data, key)]
    if given and config.task in ("arithmetic", "reasoning_gym"):
        task = "arithmetic (the default)" if config.task == "arithmetic" else config.task
        raise ValueError(
            f"data.{given[0]} is set, but task={task} generates its problems; did you mean task=math? For other "
            f"problems set task=qa or your own task (docs/own_task.md); for {config.task} remove data.{given[0]}"
        )


def _check_agent(config: RunConfig, name: str, agent: AgentConfig, *, is_trained: bool) -> None:
    if (agent.max_response_tokens or 0) > config.rollout.max_response_tokens:
        raise ValueError(
            f"agents.{name}.max_response_tokens is {agent.max_response_tokens}, above rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}; raise rollout.max_response_tokens or lower the agent's"
        )
    longest = agent.max_response_tokens or config.rollout.max_response_tokens
    if agent.overlong is not None and agent.overlong.buffer > longest:
        raise ValueError(
            f"agents.{name}.overlong.buffer is {agent.overlong.buffer}, above the agent's max_response_tokens = {longest}; "
            "lower the buffer"
        )
    policy = named_policy(config, f"agents.{name}.policy", agent.policy)
    if agent.stop and policy.openai:
        raise ValueError(
            f"agents.{name}.stop is set, but policies.{agent.policy}.openai returns completions without the stop text; "
            "give the agent a policy with engine vllm or local, or remove stop"
        )
    if is_trained and policy.frozen:
        server = f" and served by policies.{agent.policy}.openai" if policy.openai else ""
        trained = "all" if config.credit.train_agents == "all" else ", ".join(config.credit.train_agents)
        raise ValueError(
            f"agents.{name} is trained, but its policy {agent.policy} is frozen{server}; set credit.train_agents (now "
            f"{trained}) to the agents to train, without {name}"
        )
    if config.credit.trains(name) and not policy.frozen and agent.policy not in config.trained_policies:
        derived = next(other for other, candidate in config.policies.items() if candidate.base == agent.policy)
        raise ValueError(
            f"agents.{name} is trained, but its policy {agent.policy} is the frozen base of {derived}; set "
            f"policies.{agent.policy}.adapter, or remove {name} from credit.train_agents"
        )
    if name in config.max_kept and config.loss.truncation == "refuse":
        raise ValueError(
            f"agents.{name}.top_p and agents.{name}.top_k are {agent.top_p} and {agent.top_k}, but a trained agent needs 1 and "
            "-1; set those, or loss.truncation=renormalise, or remove the agent from credit.train_agents"
        )
    if name in config.max_kept and agent.top_k > config.loss.max_support:
        raise ValueError(
            f"agents.{name}.top_k is {agent.top_k}, above loss.max_support = {config.loss.max_support}, the limit for trained "
            "agents; raise loss.max_support or lower top_k"
        )


def _check_teacher(config: RunConfig, name: str, teacher: TeacherConfig) -> None:
    key = f"agents.{name}.teacher"
    to_judge = ["the judge"] if config.judge is not None and config.judge.policy == teacher.policy else []
    _check_apart(config, f"{key}.policy", teacher.policy, "scores", to_judge)
    if config.policies[teacher.policy].openai is not None:
        raise ValueError(
            f"{key}.policy is {teacher.policy!r}, served by an OpenAI-compatible server, which cannot score given tokens; "
            "name a policy with engine vllm or local"
        )
    if not config.credit.trains(name):
        raise ValueError(
            f"{key} is set, but {name} is not trained; add it to credit.train_agents, or remove the teacher"
        )


def _check_apart(config: RunConfig, key: str, name: str, does: str, askers: Sequence[str] = ()) -> None:
    """Refuse a judge or teacher policy that is trained, or whose engines also decode. askers: its other users."""
    policy = named_policy(config, key, name)
    key = f"{key} is {name!r}"
    if not policy.frozen:
        raise ValueError(
            f"{key}, which is trained; name a frozen one, `policies.NAME: {{frozen: true, model: DIRECTORY}}`"
        )
    if policy.openai is not None:
        return
    agents = [f"agents.{user}" for user, agent in config.agents.items() if agent.policy in config.policies_in(name)]
    if others := [*agents, *askers]:
        raise ValueError(
            f"{key}, whose engines also serve {others[0]}; name another policy with the same model. A judge can also use a "
            "server (engine: openai), which both may share"
        )
    rollout = config.rollout
    if rollout.placement == "local" and rollout.engine == "vllm" and rollout.overlap:
        raise ValueError(
            f"{key}, and with rollout.overlap={rollout.overlap} it {does} while other engines decode, but two vLLM engines "
            "cannot run at once in one process; set rollout.placement=disaggregated, rollout.engine=local, or rollout.overlap=0"
        )


def _check_tools(config: RunConfig) -> None:
    team = find_orchestration(config.orchestration)
    callers = dict.fromkeys(team.tools, f"orchestration={config.orchestration}")
    for agent, settings in config.agents.items():
        if settings.tools and (team.plays_sessions or team.continuation is not Orchestration.continuation):
            raise ValueError(
                f"agents.{agent}.tools is {', '.join(settings.tools)}, but orchestration={config.orchestration} defines its own "
                "continuation after a tool call; remove tools"
            )
        if settings.tools and settings.parser == "compat":
            raise ValueError(
                f"agents.{agent}.parser is compat, which would also parse the outputs of agents.{agent}.tools; set "
                "parser=strict, or remove the tools"
            )
        callers |= dict.fromkeys(settings.tools, f"agents.{agent}")
    for name, caller in callers.items():
        if name not in config.tools.given:
            raise ValueError(
                f"{caller} calls the tool {name}, which is not configured; set {how_to_set(name)} (docs/tools.md)"
            )


def _check_external(config: RunConfig) -> None:
    if (config.external is not None) != find_orchestration(config.orchestration).plays_sessions:
        raise ValueError(
            f"orchestration is {config.orchestration}, but the section external is {'set' if config.external else 'not set'}; "
            "set both orchestration=external and the program (external.function, environment or command), or neither"
        )
    if config.external is not None and config.rollout.group_completion != "wait":
        raise ValueError(
            f"rollout.group_completion is {config.rollout.group_completion}, but with orchestration=external a group ends "
            "with its sessions; set wait (external.timeout_s ends sessions that take too long)"
        )


def _check_credit(config: RunConfig) -> None:
    credit, loss = config.credit, config.loss
    if loss.kl == "none" and loss.kl_coef:
        raise ValueError(f"loss.kl_coef is {loss.kl_coef:g} but loss.kl is none; set loss.kl to k1, k2 or k3")
    if loss.kl_in == "reward" and not loss.kl_coef:
        raise ValueError("loss.kl_in is reward but loss.kl_coef is 0; set loss.kl_coef above 0, or loss.kl_in=loss")
    highest = max(loss.clip_high if agent.clip_high is None else agent.clip_high for agent in config.agents.values())
    if loss.dual_clip is not None and loss.dual_clip <= 1 + highest:
        raise ValueError(
            f"loss.dual_clip is {loss.dual_clip:g}, but the largest clip_high is {highest:g}; set loss.dual_clip above "
            f"{1 + highest:g}, or null"
        )
    if loss.correction_low > loss.upper_bound:
        raise ValueError(
            f"loss.correction_low is {loss.correction_low:g}, above loss.correction_high = {loss.upper_bound:g}; lower it"
        )
    clips = {name: (agent.clip_low, agent.clip_high) for name, agent in config.agents.items() if credit.trains(name)}
    if config.mpt.scope == "batch" and len(set(clips.values())) > 1:
        name = next(name for name, clip in clips.items() if clip != (None, None))
        raise ValueError(
            f"agents.{name}.clip_low and agents.{name}.clip_high are {clips[name][0]} and {clips[name][1]}, but mpt.scope=batch "
            "needs one clip range; set mpt.scope=sample or off, or the same range for every trained agent"
        )
    if credit.turns == "returns" and loss.aggregation == "sequence":
        raise ValueError(
            "loss.aggregation=sequence weighs a turn by the length of the sample's other turns, which biases "
            "credit.turns=returns; set loss.aggregation=token or sequence_sum_constant, or credit.turns=sample"
        )
    if credit.balance == "uniform" and not config.has_whole_instances:
        raise ValueError(
            "credit.balance=uniform needs all samples for a problem in one step; set rollout.pipeline=trajectory, or "
            "credit.normalise=agent"
        )
    if credit.normalise == "trajectory" and find_orchestration(config.orchestration).is_one_episode:
        raise ValueError(
            f"credit.normalise=trajectory compares episodes, but orchestration={config.orchestration} plays one per problem; "
            "set credit.normalise=group or global"
        )
    if not credit.train_agents:
        raise ValueError("credit.train_agents is empty; expected at least one agent: name agents, or set all")
    for name in credit.train_agents if credit.train_agents != "all" else ():
        if name not in config.agents:
            raise ValueError(f"credit.train_agents names {name!r}; the agents are {', '.join(config.agents)}")


def _check_sync(sync: SyncConfig, rollout: RolloutConfig) -> None:
    if sync.backend in ("auto", "shm"):
        return
    key = f"sync.backend={sync.backend}"
    if sync.directory is not None:
        raise ValueError(f"sync.directory is set, but {key} writes no files; remove one of them")
    if sync.backend == "nccl" and rollout.placement == "colocated":
        raise ValueError(
            f"{key}: NCCL does not support two processes on one GPU (rollout.placement=colocated); set sync.backend=ipc"
        )
    if rollout.placement == "local":
        raise ValueError(
            f"{key} works between processes, but rollout.placement=local has one; set another placement, or remove sync.backend"
        )
    if sync.backend == "ipc" and rollout.placement == "disaggregated" and not sync.cpu_twin:
        raise ValueError(
            f"{key} works between processes on one GPU; set sync.backend=nccl, or rollout.placement=colocated"
        )


def _check_quantised(config: RunConfig, name: str, *, is_trained: bool) -> None:
    key, loss = f"rollout.vllm.quantization of policies.{name} is fp8, but", config.loss
    if name not in config.undecided and config.engine_dtype(name) == "float32":
        raise ValueError(f"{key} vLLM supports fp8 only with 16-bit activations; set rollout.vllm.dtype=bfloat16")
    if not is_trained:
        return
    if config.policies[name].adapter is not None:
        raise ValueError(f"{key} a trained adapter needs the trainer's unquantised base; set quantization to null")
    if loss.correction == "none" and loss.old_policy != "sais":
        raise ValueError(
            f"{key} loss.correction=none ignores that quantised weights sample the tokens; set "
            "loss.correction=tis (or icepop, sequence_mask), or loss.old_policy=sais"
        )
    if config.sync.backend not in ("auto", "shm"):
        raise ValueError(
            f"{key} vLLM quantises weights only when it loads them from files; set sync.backend=shm, and if engines run on "
            "other hosts, sync.directory to a folder that all hosts share"
        )


def _check_policy(config: RunConfig, name: str, policy: PolicyConfig) -> None:
    key, rollout = f"policies.{name}", config.rollout
    if policy.shape is not None and policy.model is not None:
        raise ValueError(
            f"{key}.shape is {policy.shape}, the size of a warm-started policy, but {key}.model is {policy.model}; set one null"
        )
    if policy.optimizer.offload and policy.dtype == "float32":
        raise ValueError(
            f"{key}.optimizer.offload needs bfloat16 weights, but {key}.dtype is float32; set bfloat16, or offload=false"
        )
    if (policy.engine == "openai") != (policy.openai is not None):
        raise ValueError(
            f"{key}: found engine={policy.engine} {'with a' if policy.openai else 'without a'} section openai; set both "
            "engine=openai and openai (base_url, model), or neither"
        )
    if policy.engine == "openai" and (policy.engines is not None or policy.vllm is not None):
        raise ValueError(
            f"{key}.{'engines' if policy.engines else 'vllm'} is set, but {key}.engine=openai starts no engines; remove it"
        )
    if policy.engine == "openai" and not policy.frozen:
        raise ValueError(
            f"{key}: a policy with engine=openai cannot be trained, because the server returns no token ids or log-probs "
            "and accepts no weights; set frozen=true and remove its agents from credit.train_agents"
        )
    if policy.is_chat:
        _check_chat(config, name, policy)
    elif policy.frozen and policy.model is None:
        raise ValueError(
            f"{key}: a frozen policy needs `model`, a Hugging Face directory (with engine=openai the tokenizer is enough; "
            "with openai.api=chat nothing is needed)"
        )
    if policy.adapter is not None and policy.frozen:
        raise ValueError(f"{key}.adapter is set, but {key}.frozen is true; adapters are trained: remove one of them")
    if policy.adapter is not None and policy.router_aux_loss:
        raise ValueError(
            f"{key}.router_aux_loss is {policy.router_aux_loss:g}, but {key}.adapter does not train the router; set 0"
        )
    if rollout.placement == "colocated" and policy.engines not in (None, rollout.engines):
        raise ValueError(
            f"{key}.engines is {policy.engines}, but rollout.placement=colocated puts one engine of every policy on each rank's "
            "GPU; remove it, or set rollout.placement=disaggregated"
        )
    if config.loss.kl != "none" and policy.reference == "none" and name in config.trained_policies:
        raise ValueError(
            f"loss.kl={config.loss.kl} needs a reference, but {key}.reference is none; set start, past or an HF directory"
        )
    if (policy.reference == "past") != (policy.reference_every is not None):
        raise ValueError(
            f"{key}.reference is {policy.reference}, but {key}.reference_every is {policy.reference_every or 'not set'}; set "
            "both reference=past and reference_every (versions between refreshes), or neither"
        )
    if policy.reference == "past" and config.loss.kl == "none":
        raise ValueError(f"{key}.reference is past, but loss.kl is none; set loss.kl=k3, or {key}.reference=none")


def _check_chat(config: RunConfig, name: str, policy: PolicyConfig) -> None:
    """Refuse settings that the chat/completions API does not support."""
    key = f"policies.{name}.openai.api is chat"
    assert policy.openai is not None
    if policy.model is not None:
        raise ValueError(
            f"{key}, where the server renders chats, but policies.{name}.model is {policy.model}; remove model"
        )
    if policy.openai.prompt == "tokens":
        raise ValueError(f"{key}, which takes messages, but prompt is tokens; remove prompt")
    agents = {f"agents.{agent}": settings for agent, settings in config.agents.items() if settings.policy == name}
    judges = {"judge": config.judge, **{f"curate.{stage}": judge for stage, judge in config.curate.judges.items()}}
    asking = agents | {asker: judge for asker, judge in judges.items() if judge is not None and judge.policy == name}
    for asker, settings in asking.items():
        if settings.template_options:
            raise ValueError(
                f"{asker}.template_options is set, but {key}: the server renders chats; if it accepts template options, set "
                f"policies.{name}.openai.extra_body={{chat_template_kwargs: {{...}}}}"
            )
    if agents and config.rollout.segments > 1:
        raise ValueError(
            f"{key}, which cannot continue a partial answer, but rollout.segments is {config.rollout.segments}; set 1, or give "
            f"{', '.join(agents)} another policy"
        )


def named_policy(config: RunConfig, key: str, name: str) -> PolicyConfig:
    """Return the policy called `name`; ValueError names the setting `key` that refers to it."""
    if name not in config.policies:
        raise ValueError(f"{key} is {name!r}; expected a name under `policies` ({', '.join(config.policies)})")
    return config.policies[name]
