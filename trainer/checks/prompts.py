"""Preflight checks of chat templates, parsers, teachers' tokenizers, and a team's first prompts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence

from marsrl.rollout.agents import returned
from marsrl.rollout.agents.orchestration import Orchestration
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.episode import Episode
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.model_shape import read_shape
from marsrl.rollout.tasks.protocol import Task
from marsrl.rollout.tasks.registry import TOKENIZERS
from marsrl.rollout.types import Ask, Problem, ToolFunction
from marsrl.trainer.checks.batch_plan import longest_sequence
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import ConfigError
from marsrl.trainer.supervised.tutors import tutor_of

_NUM_CHECKED = 64  # Prompts of a team's first agent to check; more only if long ones are skipped and none fits yet.


def renderer_of(config: RunConfig, policy: str) -> ChatRenderer:
    """Return the chat renderer of a policy; for a policy without a model, that of its warm start."""
    if (folder := config.policies[policy].directory) is not None:
        return ChatRenderer(folder)
    tutor = tutor_of(config)
    assert tutor is not None
    with tempfile.TemporaryDirectory() as folder:
        TOKENIZERS[tutor.tokenizer].write(folder)
        return ChatRenderer(folder)


def check_templates(config: RunConfig) -> None:
    """Check that chat templates render the tools of agents, and that warm-started policies get the prompts they learned."""
    for name, agent in config.agents.items():
        prompt_keys = [key for key in ("system", "suffix") if getattr(agent, key) is not None]
        if prompt_keys and config.policies[agent.policy].model is None:
            raise ConfigError(
                f"agents.{name}.{prompt_keys[0]} is set, but policies.{agent.policy}.model is not; a warm-started policy knows "
                f"only the task's prompts: set a model, or remove {prompt_keys[0]}"
            )
        if not agent.tools:
            continue
        key, model = f"agents.{name}.tools is {', '.join(agent.tools)}", config.policies[agent.policy].directory
        if model is None:
            raise ConfigError(
                f"{key}, but policies.{agent.policy}.model is not set; a warm-started policy calls no tools: set a model"
            )
        try:
            ChatRenderer(model).check_shows_tools()
        except ValueError as error:
            raise ConfigError(f"{key}, but with policies.{agent.policy}.model = {model} {error}") from error


def check_parsers(config: RunConfig) -> None:
    """Check that vLLM's parsers, if any are set, can read what the models' chat templates write."""
    if not any(map(any, config.parsers.values())):
        return
    for name, policy in config.policies.items():
        if (policy.tool_parser or policy.reasoning_parser) and (policy.model is None or config.external is None):
            raise ConfigError(
                f"policies.{name}.tool_parser and reasoning_parser need orchestration=external and a policy with a local "
                "model; remove them"
            )
    renderers = {name: ChatRenderer(policy.model) for name, policy in config.policies.items() if policy.model}
    agents = {name: agent for name, agent in config.agents.items() if agent.policy in renderers}
    agents_of(agents, renderers, config.rollout.max_response_tokens, config.parsers)


def check_teachers(config: RunConfig) -> None:
    """Check that each teacher has its agent's tokenizer, and room for the longest sample."""
    for name, agent in config.agents.items():
        if agent.teacher is None:
            continue
        key = f"agents.{name}.teacher.policy is {agent.teacher.policy}"
        model = config.policies[agent.teacher.policy].model
        assert model is not None, "a frozen policy has a model"
        shape, policy_model = read_shape(model), config.policies[agent.policy].model
        if why := renderer_of(config, agent.policy).why_other_tokens(ChatRenderer(model)):
            raise ConfigError(
                f"{key}, but its tokenizer differs from that of policies.{agent.policy} (the token {why} there); use a "
                "model of the same family"
            )
        if policy_model is not None and (num := read_shape(policy_model).vocab_size) > shape.vocab_size:
            raise ConfigError(
                f"{key}, with a vocab_size of {shape.vocab_size} in config.json, but policies.{agent.policy} has {num}: the "
                "agent can sample tokens that the teacher lacks; use a teacher with a vocabulary as large"
            )
        if (longest := longest_sequence(config, agent.teacher.policy)) > shape.max_positions:
            raise ConfigError(
                f"{key}, whose model has {shape.max_positions} positions, but scoring a sample takes up to {longest}; "
                f"lower agents.{name}.max_input_tokens or rollout.max_response_tokens"
            )


def check_first_prompts(
    config: RunConfig,
    task: Task,
    orchestration: Orchestration,
    functions: Mapping[str, Sequence[ToolFunction]],
    num_problems: int,
) -> list[str]:
    """Return warnings about first prompts above max_input_tokens, and about prompts that do not state the form of answers.

    num_problems: number of problems in the data; 0 if the task generates them.

    Raises ConfigError if all prompts are too long and may not be cut.
    """
    if orchestration.plays_sessions:  # A program's prompts are unknown.
        return []
    source = task.problems(config.run.seed)
    (ask, *_) = _first_asks(orchestration, Episode("preflight", "preflight", source(0)))
    first, settings = ask.agent, config.in_bytes().agents[ask.agent]
    policy, room, is_skipped = settings.policy, settings.max_input_tokens, settings.long_prompts == "skip"
    renderer = renderer_of(config, policy)
    tools, options = [function for name in settings.tools for function in functions[name]], settings.template_options
    lengths, chats, problems = list[int](), list[str](), list[Problem]()
    most, key = num_problems or _NUM_CHECKED, f"agents.{first}.max_input_tokens"
    while len(lengths) < most and (len(lengths) < _NUM_CHECKED or (is_skipped and min(lengths) > room)):
        episode = Episode("preflight", "preflight", source(len(lengths)))
        (ask, *_) = _first_asks(orchestration, episode)
        messages = returned.messages(orchestration.messages(episode, ask))
        orchestration.check_words(first, messages)
        if len(lengths) < _NUM_CHECKED:
            problems.append(episode.problem)
            chats.append("\n".join(message.content for message in messages))
        lengths.append(len(renderer.render(messages, tools, **options)[0]))
        if lengths[-1] == 0:
            raise ConfigError(f"policies.{policy}.model: its tokenizer encodes a prompt to no tokens; check its files")
        if not is_skipped and renderer.render_cut(messages, room, "left", tools, **options) is None:
            raise ConfigError(f"{key} is {room}, but the chat template alone fills it; raise it")
    num_long = sum(length > room for length in lengths)
    if num_long == len(lengths) and is_skipped:
        raise ConfigError(
            f"{key} is {room}, but the shortest of {num_long} prompts has {min(lengths)} tokens: no prompt fits; raise it, or "
            f"set agents.{first}.long_prompts"
        )
    warnings = orchestration.unasked(problems, {first: chats})
    if num_long:
        fate = "be skipped" if is_skipped else f"be cut (agents.{first}.long_prompts)"
        warnings.append(f"{num_long} of {len(lengths)} prompts are longer than {key} ({room} tokens) and will {fate}")
    return warnings


def _first_asks(orchestration: Orchestration, episode: Episode) -> Sequence[Ask]:
    """Return the team's first requests to agents; ConfigError if its code fails or makes none."""
    try:
        asks = [each for each in orchestration.follow(episode) if isinstance(each, Ask)]
    except Exception as error:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow() raised on a new episode: {type(error).__name__}: {error}"
        ) from error
    if not asks:
        raise ConfigError(
            f"orchestration {orchestration.name}: follow() returns no Ask for a new problem; return at least one Ask"
        )
    return asks
