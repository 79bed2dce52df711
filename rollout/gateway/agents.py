"""Agents as programs see them, built from a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway.chats import Agent, Ask, Reader, Said
from marsrl.rollout.gateway.vllm_reader import VllmReader
from marsrl.rollout.types import IntArray


class PlainReader:
    """Parses nothing: all is content."""

    reads_calls = False

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said:
        return Said(text)


def agents_of(
    agents: Mapping[str, AgentConfig],
    renderers: Mapping[str, ChatRenderer],
    max_response_tokens: int,
    parsers: Mapping[str, tuple[str | None, str | None]] | None = None,
) -> dict[str, Agent]:
    """The configured agents; ValueError: a parser does not match its model.

    renderers: by policy. parsers: by policy, vLLM's names of the tool and reasoning parsers.
    """
    readers: dict[Any, Reader] = {}  # one for equal agents

    def reader(agent: AgentConfig) -> Reader:
        tools, thoughts = (parsers or {}).get(agent.policy, (None, None))
        if tools is None and thoughts is None:
            return PlainReader()
        key = (agent.policy, *sorted(agent.template_options.items()))
        if key not in readers:
            readers[key] = VllmReader(renderers[agent.policy], tools, thoughts, agent.template_options)
        return readers[key]

    return {
        name: Agent(name, each, renderers[each.policy], each.max_response_tokens or max_response_tokens, reader(each))
        for name, each in agents.items()
    }
