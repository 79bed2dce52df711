"""OpenAI's POST /v1/chat/completions: parses requests, renders answers as JSON or events."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.gateway.history import ChatMessage

_log = logging.getLogger(__name__)

SERVED = {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens"}
SERVED |= {"max_completion_tokens", "stop", "logprobs", "temperature", "top_p"}
NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that do not change what is answered."""
NEUTRAL: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
    "top_logprobs": 0, "parallel_tool_calls": True, "response_format": {"type": "text"}, "text": {"format": {"type": "text"}},
    "include": [], "echo": False, "suffix": "", "truncation": "disabled", "background": False, "top_k": -1, "min_p": 0,
    "thinking": {"type": "disabled"},
}  # fmt: skip
"""Fields that are served at this value alone."""

_told: set[tuple[str, str]] = set()


def check_fields(body: Mapping[str, Any], served: set[str]) -> None:
    """Refuse, by name, a field that requests something unsupported."""
    for name, value in body.items():
        if name in served or name in NO_MATTER or value is None or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        allowed = f"; {json.dumps(NEUTRAL[name])} is" if name in NEUTRAL else ""
        raise Refused(400, f"{name}={json.dumps(value)[:200]} is not served here{allowed}", "unsupported_parameter")


def agent_of(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Agent:
    """The agent named by `model`; warns once about a temperature or top_p that differs from its own."""
    agent = agents.get(str(body.get("model")))
    if agent is None:
        raise Refused(404, f"model {body.get('model')!r} is no agent; there are {', '.join(agents)}", "model_not_found")
    for name, own in (("temperature", agent.settings.temperature), ("top_p", agent.settings.top_p)):
        asked = body.get(name)
        if asked is not None and asked != own and (agent.name, name) not in _told:
            _told.add((agent.name, name))
            said = "a program asks agent %s with %s=%s; it is sampled with %g, that of its settings"
            _log.warning(said, agent.name, name, asked, own)
    return agent


def whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """The first of the given fields that is set, at least 1."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    given = body[name]
    if not isinstance(given, int) or given < 1:
        raise Refused(400, f"{name} is {given!r}; expected a whole number from 1 on")
    return given


def stops_of(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(each, str) and each for each in stops):
        raise Refused(400, f"stop is {value!r}; expected a text, or up to 4 of them")
    return tuple(stops)


def read_chat(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request. Raises Refused: it requests something unsupported, or is malformed."""
    check_fields(body, SERVED)
    agent = agent_of(body, agents)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: expected a list of at least one message")
    tools, calls_tools = read_tools(body.get("tools"), body.get("tool_choice"), agent)
    return Ask(
        agent.name,
        [chat_message(each) for each in messages],
        tools,
        max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
        stop=stops_of(body.get("stop")),
        calls_tools=calls_tools,
    )


def read_tools(given: Any, choice: Any, agent: Agent) -> tuple[Sequence[Mapping[str, Any]], bool]:
    """(tools for the chat template, whether the agent's calls are parsed)."""
    if not given:
        return (), False
    if choice not in (None, "auto", "none"):
        raise Refused(400, f"tool_choice={json.dumps(choice)[:200]} is not served here; auto and none are")
    tools = []
    for each in given:
        function = each.get("function") if isinstance(each, Mapping) and each.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools: expected functions, found {json.dumps(each)[:200]}")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}})
    if choice != "none" and (agent.reader is None or not agent.reader.reads_calls):
        raise Refused(400, f"tools: the policy of agent {agent.name} has no tool_parser (policies.<name>.tool_parser)")
    return tools, choice != "none"


def chat_message(given: Any) -> ChatMessage:
    """A message with its content as one string."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise Refused(400, f"messages: expected objects with a role, found {json.dumps(given)[:200]}")
    role = {"developer": "system", "function": "tool"}.get(given["role"], given["role"])
    message: dict[str, Any] = {"role": role, "content": text_of(given.get("content"))}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = given[name]
    thought = given.get("reasoning_content") if given.get("reasoning") is None else given["reasoning"]
    if thought is not None:
        message["reasoning"] = message["reasoning_content"] = str(thought)
    if given.get("tool_calls"):
        message["tool_calls"] = [_call(each) for each in given["tool_calls"]]
    return message


def text_of(content: Any) -> str:
    """The text of a content: parts on separate lines, "" for null."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    kinds = ("text", "input_text", "output_text")
    if not all(isinstance(part, Mapping) and part.get("type") in kinds for part in parts):
        raise Refused(400, f"content: expected texts, found {json.dumps(content)[:200]}")
    return "\n".join(str(part.get("text", "")) for part in parts)


def _call(given: Any) -> Mapping[str, Any]:
    """A call with its arguments as an object, as chat templates expect."""
    function = given["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):  # not JSON: keep the model's text
            arguments = json.loads(arguments)
    called = {"name": function.get("name"), "arguments": arguments}
    return {"id": given.get("id"), "type": "function", "function": called}


def chat_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer as a chat.completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.said.content}
    if answer.said.reasoning is not None:
        message["reasoning"] = answer.said.reasoning
    if answer.said.calls:
        message["tool_calls"] = list(answer.said.calls)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish}
    choice["logprobs"] = {"content": logprobs_of(answer)} if body.get("logprobs") else None
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": usage_of(answer)}


def chat_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The answer as chat.completion.chunk events."""
    head, said = _head(answer, "chat.completion.chunk"), answer.said
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": said.reasoning}] if said.reasoning else []
    deltas += [{"content": said.content}] if said.content else []
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(said.calls)]
    logprobs = {"content": logprobs_of(answer)} if body.get("logprobs") else None
    for delta in deltas:
        yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    last = {"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": answer.finish}
    yield event({**head, "choices": [last]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage_of(answer)})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def logprobs_of(answer: Answer) -> list[dict[str, Any]]:
    """Each token with its log-prob, nats."""
    return [
        {"token": piece, "bytes": list(piece.encode("utf-8", "replace")), "logprob": float(value), "top_logprobs": []}
        for piece, value in zip(answer.pieces(), answer.logprobs, strict=True)
    ]


def usage_of(answer: Answer) -> dict[str, int]:
    """Tokens of the prompt, those of earlier turns among them, and of the turn."""
    told, said = answer.num_prompt, len(answer.token_ids)
    return {"prompt_tokens": told, "completion_tokens": said, "total_tokens": told + said}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": answer.agent}
