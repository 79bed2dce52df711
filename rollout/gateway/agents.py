"""Agents as programs see them, built from a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway.chats import Agent, PlainReader, Reader


def agents_of(
    agents: Mapping[str, AgentConfig],
    renderers: Mapping[str, ChatRenderer],
    max_response_tokens: int,
    parsers: Mapping[str, tuple[str | None, str | None]] | None = None,
) -> dict[str, Agent]:
    """The configured agents.

    Args:
        renderers: by policy.
        max_response_tokens: default of agents without their own.
        parsers: by policy, vLLM's names of the tool and reasoning parsers.

    Raises:
        ValueError: a parser does not match its model.
    """

    readers: dict[Any, Reader] = {}  # one for equal agents

    def reader(agent: AgentConfig) -> Reader:
        tools, thoughts = (parsers or {}).get(agent.policy, (None, None))
        if tools is None and thoughts is None:
            return PlainReader()
        from marsrl.rollout.gateway.vllm_reader import VllmReader  # imported here: vLLM takes ten seconds

        key = (agent.policy, *sorted(agent.template_options.items()))
        if key not in readers:
            readers[key] = VllmReader(renderers[agent.policy], tools, thoughts, agent.template_options)
        return readers[key]

    return {
        name: Agent(
            name,
            renderers[agent.policy],
            agent.max_input_tokens,
            agent.max_response_tokens or max_response_tokens,
            agent.temperature,
            agent.top_p,
            tuple(agent.stop),
            agent.template_options,
            reader(agent),
        )
        for name, agent in agents.items()
    }
