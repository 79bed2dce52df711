"""The arithmetic of one step, printed before a run: prompts x group x agents -> samples -> tokens -> micro-batches."""

from __future__ import annotations

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.orchestrations.registry import build_orchestration
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError


def samples_of_a_step(config: RunConfig) -> tuple[dict[str, int], bool]:
    """Return {agent: samples of a step}, and whether these are upper bounds.

    If they are not upper bounds, the numbers assume one call per agent and episode.
    """
    agents = {
        name: agent.model_copy(update={"prompt": None, "parser": "strict"}) for name, agent in config.agents.items()
    }
    team = build_orchestration(  # prompt texts do not matter here; the task qa has one for every role
        config.orchestration, agents, "qa", config.orchestration_options, config.rollout
    )
    of_instance = team.most_samples()
    known = of_instance or dict.fromkeys(config.agents, config.rollout.group_size)
    return {agent: config.rollout.most_problems * most for agent, most in known.items()}, bool(of_instance)


def batch_plan(config: RunConfig, world_size: int) -> tuple[str, ...]:
    """Return the batch sizes of a step as lines of text: upper bounds, once the pipeline is full.

    Steps with fewer samples or shorter completions have fewer tokens. Prompts are not counted.
    """
    rollout, trainer = config.rollout, config.trainer
    samples, is_bound = samples_of_a_step(config)
    problems, most, (first, *later) = rollout.most_problems, sum(samples.values()), samples
    up_to = "" if rollout.refill is None else "at most "
    condition = "" if is_bound else ", if each agent is called once per episode"
    others = (
        f"{len(later)} later agent{'s' if len(later) > 1 else ''} x at most {max(samples[agent] for agent in later)} samples "
        f"each -> at most {most} samples a step{condition}"
        if later
        else f"one agent: {most} samples a step{condition}"
    )
    tokens, data_parallel = most * rollout.max_response_tokens, _data_parallel(config, world_size)
    micro_batches = -(-tokens // data_parallel // trainer.max_tokens_per_micro_batch)
    updates = f"{trainer.updates_per_step} optimizer updates a step, each on its part of the groups"
    return (
        f"{up_to}{problems} problems a step x {samples[first] // problems} samples = {samples[first]} samples of {first}",
        others,
        f"at most {tokens:,} completion tokens a step ({rollout.tokens_per_stage} a sample and stage)",
        f"{world_size} rank(s), {data_parallel} data-parallel; micro-batches of at most "
        f"{trainer.max_tokens_per_micro_batch:,} tokens -> at most {micro_batches} a rank, prompts not counted",
        *([updates] if trainer.updates_per_step > 1 else []),
    )


def _data_parallel(config: RunConfig, world_size: int) -> int:
    layout = next(iter((config.trained_policies or config.policies).values())).layout
    return -(-world_size // (layout.tensor * layout.pipeline * layout.context))


def why_not_one_micro_batch(config: RunConfig, world_size: int) -> str | None:
    """Return why mpt.scope=batch cannot be used (an update may not fit into one micro-batch per rank); None if it can."""
    if config.mpt.scope != "batch":
        return None
    tokens = sum(samples_of_a_step(config)[0].values()) * config.rollout.max_response_tokens
    update_tokens = -(-tokens // _data_parallel(config, world_size) // config.trainer.updates_per_step)
    if update_tokens <= (room := config.trainer.max_tokens_per_micro_batch):
        return None
    return (
        f"mpt.scope=batch needs one micro-batch per rank and update, whose completions can have {update_tokens:,} tokens: raise "
        f"trainer.max_tokens_per_micro_batch, {room:,} now, or set mpt.scope=sample"
    )


def longest_sequence(config: RunConfig, policy: str) -> int:
    """Return the number of tokens of the longest sequence that the policy must process.

    The sequences are prompts with their completions: those of the policy's agents, of the agents of its adapters, and of the
    judge. For a teacher, they are the samples that the teacher scores.

    Raises ValueError: no agent or judge has the policy.
    """

    def whole(agent: AgentConfig) -> int:
        return agent.max_input_tokens + (agent.max_response_tokens or config.rollout.max_response_tokens)

    agents = config.agents.values()
    longest = [whole(agent) for agent in agents if agent.policy in config.policies_in(policy)]
    taught = [agent for agent in agents if agent.teacher is not None and agent.teacher.policy == policy]
    longest += [whole(agent) + 1 for agent in taught]  # vLLM also samples one token after the scored ones
    if config.judge is not None and config.judge.policy == policy:
        longest.append(config.judge.max_input_tokens + config.judge.max_response_tokens)
    if not longest:
        raise ValueError(
            f"policies.{policy}: no agent (agents.<name>.policy, or teacher.policy) and no judge (judge.policy) uses it; "
            "remove it"
        )
    return max(longest)


def shorten_prompts(config: RunConfig, policy: str, max_positions: int, *, trains: bool = True) -> RunConfig:
    """Lower max_input_tokens of the policy's agents and of its judge to leave room for a whole completion.

    The limit is the model's number of positions and, for a trained policy (trains), the micro-batch, which holds whole samples.

    Raises ConfigError: a completion alone reaches the limit.
    """

    def shortened(key: str, max_input_tokens: int, max_response_tokens: int, bounds: dict[str, int]) -> int:
        bound, room = min(bounds.items(), key=lambda each: each[1])
        if room <= max_response_tokens:
            raise ConfigError(f"{key} is {max_response_tokens}, but {bound}, and a prompt needs room too; lower {key}")
        return min(max_input_tokens, room - max_response_tokens)

    why = "(max_position_embeddings, or a shorter sliding_window)"
    positions = {f"policies.{policy}.model has {max_positions} positions {why}": max_positions}
    bounds, agents, judge = dict(positions), dict(config.agents), config.judge
    if trains and not config.policies[policy].frozen:
        most = config.trainer.max_tokens_per_micro_batch
        bounds[f"trainer.max_tokens_per_micro_batch is {most}"] = most
    for name, agent in agents.items():
        if agent.policy == policy:
            own = agent.max_response_tokens
            key = "rollout.max_response_tokens" if own is None else f"agents.{name}.max_response_tokens"
            length = shortened(key, agent.max_input_tokens, own or config.rollout.max_response_tokens, bounds)
            agents[name] = agent.model_copy(update={"max_input_tokens": length})
    if judge is not None and judge.policy == policy:
        length = shortened("judge.max_response_tokens", judge.max_input_tokens, judge.max_response_tokens, positions)
        judge = judge.model_copy(update={"max_input_tokens": length})
    return config.model_copy(update={"agents": agents, "judge": judge})
