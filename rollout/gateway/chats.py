"""Protocol-independent types: an agent as programs see it, a program's request, and the agent's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway.history import ChatMessage
from marsrl.rollout.types import FloatArray, IntArray


class Refused(Exception):
    """A rejected request. status: HTTP status. code: OpenAI's error code, or None."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. Either messages and tools as in OpenAI's chat API, or a raw prompt.

    A raw prompt is token ids [N], or text in which names of special tokens, such as <|im_end|>, stand for these tokens.

    options: chat template options that differ from the agent's. calls_tools: False if calls in the answer stay text.
    must_call: name of the function that the turn must call first; "": any function; None: the agent decides.
    one_call: True if the turn ends after its first call. lineage, caller: names from headers (lineage.py); "": none.
    """

    agent: str
    messages: Sequence[ChatMessage] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: IntArray | str | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls_tools: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    must_call: str | None = None
    one_call: bool = False
    lineage: str = ""
    caller: str = ""

    @property
    def shown(self) -> Any:
        """Tools and template options of this call, on which the prompt depends besides the messages."""
        return (self.tools, self.options) if self.options else self.tools


@dataclass(frozen=True, slots=True)
class Said:
    """An agent's parsed turn. calls: tool calls, in the form of `tool_calls` of OpenAI's messages."""

    content: str
    reasoning: str | None = None
    calls: Sequence[Mapping[str, Any]] = ()


class Reader(Protocol):
    """Parser of thoughts and tool calls in the text of a turn.

    reads_calls: False if calls stay text. closing: text that ends each call; "" if unknown.
    """

    reads_calls: bool
    closing: str

    def opening(self, name: str) -> str:
        """Return the text with which a turn begins that calls the function `name`; "" stands for any function."""

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished turn.

    id: id by which a program may reward the turn. uid: uid of the turn's sample. finish: stop, length or tool_calls. stop: the
    stop string that ended the turn, or "". prompt_ids: the tokens before the turn. logprobs: log-probs of the turn's tokens, in
    nats. pieces: function that returns the text of each token.
    """

    id: str
    uid: str
    agent: str
    said: Said
    finish: str
    stop: str
    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray
    pieces: Callable[[], list[str]]


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent as programs see it.

    settings: the agent's settings; its sampling settings take precedence over those in a request.
    max_response_tokens: maximum length of a turn.

    reader: parser of the agent's turns; None: the whole text is content. server: openai.api of a policy behind a server, where
    tokens and log-probs are unknown; "": marsrl's engines.
    """

    name: str
    settings: AgentConfig
    renderer: ChatRenderer
    max_response_tokens: int
    reader: Reader | None
    server: str = ""
