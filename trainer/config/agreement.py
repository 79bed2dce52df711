"""Rules between sections of a config: policies, agents, tools and judges.

Rules within one section are in the file that defines the section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.config import AgentConfig, TeacherConfig
from marsrl.rollout.orchestrations.registry import ORCHESTRATIONS, find_orchestration
from marsrl.rollout.tasks.find_task import lists_problems
from marsrl.rollout.tools.config import how_to_set
from marsrl.trainer.config.policy import PolicyConfig
from marsrl.trainer.config.run_config import RunConfig
from marsrl.trainer.config.sections import LeagueConfig


def check_agreement(config: RunConfig, *, trains: bool) -> None:
    """Raise ValueError if sections of the config contradict each other; each section is already valid alone.

    trains: False for commands that train nothing; all policies may then be frozen.
    """
    for reason in _why_not(config, trains=trains):
        raise ValueError(reason)


def _why_not(config: RunConfig, *, trains: bool) -> Iterator[str]:
    agents, trained = config.agents, {name: a for name, a in config.agents.items() if config.credit.trains(name)}
    yield from config.data.why_not(config.task)
    for name, policy in config.policies.items():
        is_trained = name in config.trained_policies
        yield from policy.why_not(f"policies.{name}", config.rollout, kl=config.loss.kl, is_trained=is_trained)
        if policy.is_chat:
            yield from _of_chat(config, name, policy)
    if not config.trained_policies and trains:
        yield f"policies: all are frozen ({', '.join(config.policies)}); expected at least one to train: unfreeze one"
    for name, agent in agents.items():
        yield from _of_agent(config, name, agent, is_trained=trains and name in trained)
        if agent.teacher is not None and trains:
            yield from _of_teacher(config, name, agent.teacher)
    yield from _of_tools(config)
    yield from _of_external(config)
    if config.league is not None and trains:
        yield from _of_league(config, config.league)
    if config.judge is not None:
        yield from _of_one_apart(config, "judge.policy", config.judge.policy, "judges")
    yield from config.sync.why_not(config.rollout)
    yield from config.trainer.why_not(config.rollout)
    if trains and config.trainer.shared_prefixes != "off":
        yield from _of_shared_prefixes(config)
    for name in config.policies if config.rollout.engine == "vllm" else ():
        if config.rollout_of(name).vllm.quantization is not None:
            yield from _of_quantised(config, name, is_trained=trains and name in config.trained_policies)
    if trains and (config.rollout.refill is not None or config.data.rest):
        yield from _of_counted(config)
    yield from config.loss.why_not(agents)
    yield from config.mpt.why_not(trained)
    yield from config.credit.why_not(
        agents,
        config.orchestration,
        aggregation=config.loss.aggregation,
        has_whole_instances=config.has_whole_instances,
    )


def _of_agent(config: RunConfig, name: str, agent: AgentConfig, *, is_trained: bool) -> Iterator[str]:
    if (agent.max_response_tokens or 0) > config.rollout.max_response_tokens:
        yield (
            f"agents.{name}.max_response_tokens is {agent.max_response_tokens}, above rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}; raise rollout.max_response_tokens or lower the agent's"
        )
    longest = agent.max_response_tokens or config.rollout.max_response_tokens
    if agent.overlong is not None and agent.overlong.buffer > longest:
        yield (
            f"agents.{name}.overlong.buffer is {agent.overlong.buffer}, above the agent's max_response_tokens = {longest}; "
            "lower the buffer"
        )
    policy = named_policy(config, f"agents.{name}.policy", agent.policy)
    if agent.stop and policy.openai:
        yield (
            f"agents.{name}.stop is set, but policies.{agent.policy}.openai returns completions without the stop text; "
            "give the agent a policy with engine vllm or local, or remove stop"
        )
    if is_trained and policy.frozen:
        server = f" and served by policies.{agent.policy}.openai" if policy.openai else ""
        trained = "all" if config.credit.train_agents == "all" else ", ".join(config.credit.train_agents)
        yield (
            f"agents.{name} is trained, but its policy {agent.policy} is frozen{server}; set credit.train_agents (now "
            f"{trained}) to the agents to train, without {name}"
        )
    if config.credit.trains(name) and not policy.frozen and agent.policy not in config.trained_policies:
        derived = next(other for other, candidate in config.policies.items() if candidate.base == agent.policy)
        yield (
            f"agents.{name} is trained, but its policy {agent.policy} is the frozen base of {derived}; set "
            f"policies.{agent.policy}.adapter, or remove {name} from credit.train_agents"
        )
    if name in config.max_kept and config.loss.truncation == "refuse":
        yield (
            f"agents.{name}.top_p and agents.{name}.top_k are {agent.top_p} and {agent.top_k}, but a trained agent needs 1 and "
            "-1; set those, or loss.truncation=renormalise, or remove the agent from credit.train_agents"
        )
    if name in config.max_kept and agent.top_k > config.loss.max_support:
        yield (
            f"agents.{name}.top_k is {agent.top_k}, above loss.max_support = {config.loss.max_support}, the limit for trained "
            "agents; raise loss.max_support or lower top_k"
        )


def _of_teacher(config: RunConfig, name: str, teacher: TeacherConfig) -> Iterator[str]:
    key = f"agents.{name}.teacher"
    to_judge = ["the judge"] if config.judge is not None and config.judge.policy == teacher.policy else []
    yield from _of_one_apart(config, f"{key}.policy", teacher.policy, "scores", to_judge)
    if config.policies[teacher.policy].openai is not None:
        yield (
            f"{key}.policy is {teacher.policy!r}, served by an OpenAI-compatible server, which cannot score given tokens; "
            "name a policy with engine vllm or local"
        )
    if not config.credit.trains(name):
        yield f"{key} is set, but {name} is not trained; add it to credit.train_agents, or remove the teacher"


def _of_one_apart(config: RunConfig, key: str, name: str, does: str, askers: Sequence[str] = ()) -> Iterator[str]:
    """Refuse a judge or teacher policy that is trained, or whose engines have other users too.

    key: setting that names the policy. does: what the judge or teacher does. askers: users of the policy other than agents, as
        text for the message.
    """
    policy = named_policy(config, key, name)
    key = f"{key} is {name!r}"
    if not policy.frozen:
        yield f"{key}, which is trained; name a frozen one, `policies.NAME: {{frozen: true, model: DIRECTORY}}`"
    if policy.openai is not None:
        return
    agents = [f"agents.{user}" for user, agent in config.agents.items() if agent.policy in config.policies_in(name)]
    if others := [*agents, *askers]:
        yield (
            f"{key}, whose engines also serve {others[0]}; name another policy with the same model. A judge can also use a "
            "server (engine: openai), which both may share"
        )
    rollout = config.rollout
    if rollout.placement == "local" and rollout.engine == "vllm" and rollout.overlap:
        yield (
            f"{key}, and with rollout.overlap={rollout.overlap} it {does} while other engines decode, but two vLLM engines "
            "cannot run at once in one process; set rollout.placement=disaggregated, rollout.engine=local, or rollout.overlap=0"
        )


def _of_tools(config: RunConfig) -> Iterator[str]:
    team = find_orchestration(config.orchestration)
    callers = dict.fromkeys(team.tools, f"orchestration={config.orchestration}")
    for agent, settings in config.agents.items():
        if settings.tools and (team.plays_sessions or team.continuation is not Orchestration.continuation):
            yield (
                f"agents.{agent}.tools is {', '.join(settings.tools)}, but orchestration={config.orchestration} defines its own "
                "continuation after a tool call; remove tools"
            )
        if settings.tools and settings.parser == "compat":
            yield (
                f"agents.{agent}.parser is compat, which would also parse the outputs of agents.{agent}.tools; set "
                "parser=strict, or remove the tools"
            )
        callers |= dict.fromkeys(settings.tools, f"agents.{agent}")
    for name, caller in callers.items():
        if name not in config.tools.given:
            yield f"{caller} calls the tool {name}, which is not configured; set {how_to_set(name)} (docs/tools.md)"


def _of_external(config: RunConfig) -> Iterator[str]:
    if (config.external is not None) != find_orchestration(config.orchestration).plays_sessions:
        yield (
            f"orchestration is {config.orchestration}, but the section external is {'set' if config.external else 'not set'}; "
            "set both orchestration=external and the program (external.function, environment or command), or neither"
        )
    if config.external is not None and config.rollout.group_completion != "wait":
        yield (
            f"rollout.group_completion is {config.rollout.group_completion}, but with orchestration=external a group ends "
            "with its sessions; set wait (external.timeout_s ends sessions that take too long)"
        )


def _of_counted(config: RunConfig) -> Iterator[str]:
    """Refuse rollout.refill and data.rest if there are no groups to count, or if no problem repeats."""
    refill, problems = config.rollout.refill, config.rollout.prompts_per_step
    key = "data.rest" if refill is None else "rollout.refill"
    if not config.rewarded_agents:
        yield (
            f"{key} counts groups of agents that are trained on their rewards, but there are none, because "
            f"agents.<name>.loss_weight is 0 for every trained agent; raise a loss_weight, or turn {key} off"
        )
        return
    if config.credit.normalise == "step":
        yield (
            f"{key} counts groups with spread, but credit.normalise=step compares samples of all groups, so that each has a "
            f"gradient; turn {key} off, or set another credit.normalise"
        )
    first = find_orchestration(config.orchestration).agents[0].name
    is_first = config.orchestration in ORCHESTRATIONS and config.counted_agent == first
    if refill is not None and (config.has_whole_instances or is_first) and refill.groups > problems:
        yield (
            f"rollout.refill.groups is {refill.groups}, but with rollout.prompts_per_step={problems} a step has at most "
            f"{problems} groups with spread; lower it, or raise rollout.prompts_per_step"
        )
    if config.data.rest and config.data.train is None and not lists_problems(config.task):
        yield (
            f"data.rest is {config.data.rest}, but task={config.task} generates new problems and never repeats one; set "
            "data.train, or data.rest=0"
        )


def _of_shared_prefixes(config: RunConfig) -> Iterator[str]:
    """Refuse settings that contradict computing a shared prefix only once."""
    key = f"trainer.shared_prefixes is {config.trainer.shared_prefixes}, but policies"
    for name, policy in config.trained_policies.items():
        if policy.layout.context > 1:
            yield (
                f"{key}.{name}.layout.context is {policy.layout.context}, which splits every sample by itself; set "
                "trainer.shared_prefixes=off, or context=1"
            )
        if policy.router_aux_loss:
            yield (
                f"{key}.{name}.router_aux_loss is {policy.router_aux_loss:g}, a loss over the tokens of each sample; set "
                "trainer.shared_prefixes=off, or router_aux_loss=0"
            )
        if policy.deterministic:
            yield (
                f"{key}.{name}.deterministic is true, and a GPU adds up the gradients of shared tokens in any order; set "
                "trainer.shared_prefixes=off, or deterministic=false"
            )


def _of_league(config: RunConfig, league: LeagueConfig) -> Iterator[str]:
    policy, key = named_policy(config, "league.policy", league.policy), f"league.policy is {league.policy}"
    if policy.adapter is None:
        yield (
            f"{key}, which has no adapter, but a league loads past adapters beside the current one; set "
            f"policies.{league.policy}.adapter ({{}} for the defaults), or remove league"
        )
    seats = [name for name, agent in config.agents.items() if agent.policy == league.policy]
    if len(seats) != 2:
        yield (
            f"{key}, the policy of {', '.join(seats) or 'no agent'}; expected exactly two agents, which play each other: set "
            "agents.<name>.policy, or remove league"
        )
    if not (config.run.evaluate or config.run.eval_every):
        yield (
            "league is set, but there are no evaluations (run.evaluate is false, run.eval_every 0); set run.eval_every"
        )


def _of_quantised(config: RunConfig, name: str, *, is_trained: bool) -> Iterator[str]:
    key, loss = f"rollout.vllm.quantization of policies.{name} is fp8, but", config.loss
    if name not in config.undecided and config.engine_dtype(name) == "float32":
        yield f"{key} vLLM supports fp8 only with 16-bit activations; set rollout.vllm.dtype=bfloat16"
    if not is_trained:
        return
    if config.policies[name].adapter is not None:
        yield f"{key} a trained adapter needs the trainer's unquantised base; set quantization to null"
    if loss.correction == "none" and loss.old_policy != "sais":
        yield (
            f"{key} loss.correction=none ignores that quantised weights sample the tokens; set "
            "loss.correction=tis (or icepop, sequence_mask), or loss.old_policy=sais"
        )
    if config.sync.delta:
        yield f"{key} its engines keep no unrounded weights that changes could be applied to; set sync.delta=false"


def _of_chat(config: RunConfig, name: str, policy: PolicyConfig) -> Iterator[str]:
    """Refuse settings that the chat/completions API does not support."""
    key = f"policies.{name}.openai.api is chat"
    assert policy.openai is not None
    if policy.model is not None:
        yield f"{key}, where the server renders chats, but policies.{name}.model is {policy.model}; remove model"
    if policy.openai.prompt == "tokens":
        yield f"{key}, which takes messages, but prompt is tokens; remove prompt"
    agents = {f"agents.{agent}": settings for agent, settings in config.agents.items() if settings.policy == name}
    judges = {"judge": config.judge, **{f"curate.{stage}": judge for stage, judge in config.curate.judges.items()}}
    asking = agents | {asker: judge for asker, judge in judges.items() if judge is not None and judge.policy == name}
    for asker, settings in asking.items():
        if settings.template_options:
            yield (
                f"{asker}.template_options is set, but {key}: the server renders chats; if it accepts template options, set "
                f"policies.{name}.openai.extra_body={{chat_template_kwargs: {{...}}}}"
            )
    if agents and config.rollout.segments > 1:
        yield (
            f"{key}, which cannot continue a partial answer, but rollout.segments is {config.rollout.segments}; set 1, or give "
            f"{', '.join(agents)} another policy"
        )


def named_policy(config: RunConfig, key: str, name: str) -> PolicyConfig:
    """Return the policy called `name`; a missing policy raises ValueError with the setting `key` that refers to it."""
    if name not in config.policies:
        raise ValueError(f"{key} is {name!r}; expected a name under `policies` ({', '.join(config.policies)})")
    return config.policies[name]
