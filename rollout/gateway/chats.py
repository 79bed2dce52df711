"""Agents as programs see them, a program's request to one, and the answer, independent of the protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway.history import ChatMessage
from marsrl.rollout.types import FloatArray, IntArray


class Refused(Exception):
    """A rejected request. status: of HTTP; code: OpenAI's error code, for some."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. messages and tools as in OpenAI's chat API; or a raw prompt: its tokens [N], or its text, in which
    control words are control tokens.

    calls_tools: False if calls in the answer stay text.
    """

    agent: str
    messages: Sequence[ChatMessage] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: IntArray | str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_tools: bool = True


@dataclass(frozen=True, slots=True)
class Said:
    """An agent's turn, parsed. calls: as `tool_calls` of OpenAI's messages."""

    content: str
    reasoning: str | None = None
    calls: Sequence[Mapping[str, Any]] = ()


class Reader(Protocol):
    """Parses thoughts and tool calls from the text of a turn."""

    reads_calls: bool

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn.

    id: with which a program may reward it; uid: of its sample. finish: stop, length or tool_calls; stop: the stop string
    behind it, or "". num_prompt: tokens before it; logprobs in nats; pieces: gives the text of each token.
    """

    id: str
    uid: str
    agent: str
    said: Said
    finish: str
    stop: str
    num_prompt: int
    token_ids: IntArray
    logprobs: FloatArray
    pieces: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent as programs see it. settings: they hold whatever a program requests; max_response_tokens: theirs, or the run's.

    reader: of its turns; None: all is content.
    """

    name: str
    settings: AgentConfig
    renderer: ChatRenderer
    max_response_tokens: int
    reader: Reader | None
