"""OpenAI's POST /v1/chat/completions: parses requests, renders answers as JSON or events."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.gateway.history import ChatMessage

_log = logging.getLogger(__name__)

SERVED = {"model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "max_tokens"}
SERVED |= {"max_completion_tokens", "stop", "logprobs", "chat_template_kwargs", "return_token_ids"}
DRAWN = {"temperature", "top_p", "top_k", "seed"}
"""Sampling fields, which are ignored: the agent's settings and run.seed decide. A differing value is logged once."""
NO_MATTER = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "cache_control", "cache_salt", "request_id", "priority", "session_id", "stream_interval",
}  # fmt: skip
"""Fields that do not change the answer."""
NEUTRAL: Mapping[str, Any] = {
    "n": 1, "best_of": 1, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
    "top_logprobs": 0, "response_format": {"type": "text"}, "text": {"format": {"type": "text"}}, "modalities": ["text"],
    "verbosity": "medium", "include": [], "echo": False, "suffix": "", "truncation": "disabled", "background": False,
    "min_p": 0, "thinking": {"type": "disabled"}, "length_penalty": 1, "use_beam_search": False, "min_tokens": 0,
    "ignore_eos": False, "stop_token_ids": [], "bad_words": [], "include_stop_str_in_output": False,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "add_generation_prompt": True,
    "continue_final_message": False, "add_special_tokens": False, "include_reasoning": True,
    "return_tokens_as_token_ids": False, "return_token_offsets": False, "return_prompt_text": False,
}  # fmt: skip
"""Fields that are supported only with this value."""
_FLAG, _OBJECT = (bool, "true or false"), (dict, "an object")
_KINDS: dict[str, tuple[type, str]] = {"stream": _FLAG, "parallel_tool_calls": _FLAG, "return_token_ids": _FLAG}
_KINDS |= {"stream_options": _OBJECT, "chat_template_kwargs": _OBJECT, "sampling_params": _OBJECT}
_KINDS |= {"tools": (list, "a list")}
_OMITTED = {"function_call": ": use tool_calls", "refusal": ": use content", "audio": "", "prefix": "", "partial": ""}
"""Fields of messages that chat templates do not show or do not follow, and what to use instead."""
_OF_RENDERER = {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message"}

_told: set[tuple[str, str]] = set()


def check_fields(body: Mapping[str, Any], served: set[str]) -> None:
    """Raise Refused for the first field that requests something unsupported; the message names the field."""
    for name, value in body.items():
        kind, expected = _KINDS.get(name, (object, "")) if name in served else (object, "")
        if value is not None and not isinstance(value, kind):
            raise Refused(400, f"{name} is {json.dumps(value)[:200]}; expected {expected}")
        if name in served | DRAWN | NO_MATTER or value is None or (name in NEUTRAL and value == NEUTRAL[name]):
            continue
        allowed = f"; use {json.dumps(NEUTRAL[name])}" if name in NEUTRAL else ""
        raise Refused(400, f"{name}={json.dumps(value)[:200]} is unsupported{allowed}", "unsupported_parameter")


def agent_of(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Agent:
    """Return the agent named by `model`; warn once about a sampling field that differs from the agent's own."""
    agent = agents.get(str(body.get("model")))
    if agent is None:
        raise Refused(
            404, f"model {body.get('model')!r} is not an agent; expected one of {', '.join(agents)}", "model_not_found"
        )
    for name in sorted(DRAWN):
        asked, own = body.get(name), getattr(agent.settings, name, None)
        off = (0, -1) if name == "top_k" else ()
        if asked is not None and asked != own and not (asked in off and own in off) and (agent.name, name) not in _told:
            _told.add((agent.name, name))
            uses = "run.seed: sessions of a group differ" if own is None else f"agents.{agent.name}.{name} = {own:g}"
            _log.warning(
                "a program calls agent %s with %s=%s, which is ignored; sampling uses %s", agent.name, name, asked, uses
            )
    if agent.server and (body.get("return_token_ids") or body.get("logprobs") not in (None, False)):
        why = "is on a server, which returns neither token ids nor log-probs; omit return_token_ids and logprobs"
        raise Refused(400, f"agent {agent.name} {why}")
    return agent


def whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is set, else None. Raises Refused: it is not a whole number of at least 1."""
    name = next((name for name in names if body.get(name) is not None), None)
    if name is None:
        return None
    given = body[name]
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise Refused(400, f"{name} is {given!r}; expected a whole number of at least 1")
    return given


def stops_of(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(each, str) and each for each in stops):
        raise Refused(400, f"stop is {value!r}; expected a string, or a list of up to 4 strings")
    return tuple(stops)


def read_chat(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request. Raises Refused: it requests something unsupported, or is malformed."""
    check_fields(body, SERVED)
    agent, messages = agent_of(body, agents), body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(400, "messages: expected a list of at least one message")
    tools, calls_tools, must_call = read_tools(body.get("tools"), body.get("tool_choice"), agent)
    one_call = calls_tools and body.get("parallel_tool_calls") is False
    if one_call and (agent.server or agent.reader is None or not agent.reader.closing):
        why = (
            "its server cannot stop after a call" if agent.server else "the chat template has no text that ends a call"
        )
        raise Refused(400, f"parallel_tool_calls=false is unsupported for agent {agent.name}: {why}; omit it")
    if not isinstance(body.get("logprobs") or False, bool):
        raise Refused(400, f"logprobs is {json.dumps(body['logprobs'])[:200]}; expected true or false")
    return Ask(
        agent.name,
        [chat_message(each) for each in messages],
        tools,
        max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
        stop=stops_of(body.get("stop")),
        calls_tools=calls_tools,
        options=_template_options(body.get("chat_template_kwargs"), agent),
        must_call=must_call,
        one_call=one_call,
    )


def _template_options(given: Any, agent: Agent) -> Mapping[str, Any]:
    """Return the chat template options that differ from the agent's own."""
    template = str(agent.renderer.tokenizer.get_chat_template())
    for name, value in (given or {}).items():
        if name in _OF_RENDERER or not re.search(rf"\b{re.escape(name)}\b", template):
            raise Refused(
                400, f"chat_template_kwargs.{name}: the chat template of agent {agent.name} has no such option"
            )
        if not isinstance(value, bool | int | float | str):
            found = json.dumps(value)[:200]
            raise Refused(400, f"chat_template_kwargs.{name} is {found}; expected a boolean, number or string")
    own = agent.settings.template_options
    return {name: value for name, value in (given or {}).items() if name not in own or own[name] != value}


def read_tools(given: Any, choice: Any, agent: Agent) -> tuple[Sequence[Mapping[str, Any]], bool, str | None]:
    """Return (tools for the chat template, whether the agent's calls are parsed, Ask.must_call)."""
    if not given and choice in (None, "auto", "none"):
        return (), False, None
    tools: list[dict[str, Any]] = []
    kinds: dict[str, Any] = {"name": str, "description": str | None, "parameters": Mapping | None}
    for each in given or ():
        function = each.get("function") if isinstance(each, Mapping) and each.get("type") == "function" else None
        if not isinstance(function, Mapping) or not all(isinstance(function.get(k), kind) for k, kind in kinds.items()):
            raise Refused(400, f"tools: expected functions, found {json.dumps(each)[:200]}")
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}})
    if tools and choice != "none" and (agent.reader is None or not agent.reader.reads_calls):
        raise Refused(
            400, f"tools: the policy of agent {agent.name} has no tool parser; set policies.<name>.tool_parser"
        )
    if choice in (None, "auto", "none"):
        return tools, choice != "none", None
    names = [tool["function"]["name"] for tool in tools]
    for must_call in ("", *names):
        named = {"type": "function", "function": {"name": must_call}}
        if tools and choice == (named if must_call else "required"):
            return tools, True, must_call
    said = f"use auto or none; if the request has tools, also required or the name of a tool ({', '.join(names) or 'none given'})"
    raise Refused(400, f"tool_choice={json.dumps(choice)[:200]} is unsupported; {said}", "unsupported_parameter")


def chat_message(given: Any) -> ChatMessage:
    """Parse a message, with its content as one string."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise Refused(400, f"messages: expected objects with a role, found {json.dumps(given)[:200]}")
    if found := next((name for name in _OMITTED if given.get(name)), None):
        raise Refused(
            400, f"messages: the field {found} is unsupported{_OMITTED[found]}; found {json.dumps(given)[:200]}"
        )
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
    """Return the text of a message's content: parts on separate lines; "" for null."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    kinds = ("text", "input_text", "output_text")
    if not all(isinstance(part, Mapping) and part.get("type") in kinds for part in parts):
        raise Refused(400, f"content: expected text parts, found {json.dumps(content)[:200]}")
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(400, f"content: expected parts with a string as text, found {json.dumps(content)[:200]}")
    return "\n".join(texts)


def _call(given: Any) -> Mapping[str, Any]:
    """Parse a call, with its arguments as an object, as chat templates expect."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(400, f"messages: expected tool_calls of functions with a name, found {json.dumps(given)[:200]}")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with suppress(ValueError):  # not JSON: keep the model's text
            arguments = json.loads(arguments)
    called = {"name": function["name"], "arguments": arguments}
    return {"id": given.get("id"), "type": "function", "function": called}


def chat_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Render the answer as a chat.completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.said.content}
    if answer.said.reasoning is not None:
        message["reasoning"] = answer.said.reasoning
    if answer.said.calls:
        message["tool_calls"] = list(answer.said.calls)
    choice = {"index": 0, "message": message, "finish_reason": answer.finish}
    choice["logprobs"] = {"content": logprobs_of(answer)} if body.get("logprobs") else None
    whole = {**_head(answer, "chat.completion"), "choices": [choice], "usage": usage_of(answer)}
    if body.get("return_token_ids"):
        whole["prompt_token_ids"], choice["token_ids"] = answer.prompt_ids.tolist(), answer.token_ids.tolist()
    return whole


def chat_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Render the answer as chat.completion.chunk events."""
    head, said = _head(answer, "chat.completion.chunk"), answer.said
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": said.reasoning}] if said.reasoning else []
    deltas += [{"content": said.content}] if said.content else []
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(said.calls)]
    logprobs = {"content": logprobs_of(answer)} if body.get("logprobs") else None
    last = {"index": 0, "delta": {}, "logprobs": logprobs, "finish_reason": answer.finish}
    ids = {"prompt_token_ids": answer.prompt_ids.tolist()} if body.get("return_token_ids") else {}
    last |= {"token_ids": answer.token_ids.tolist()} if ids else {}
    for place, delta in enumerate(deltas):
        of_first = ids if place == 0 else {}
        yield event({**head, **of_first, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield event({**head, "choices": [last]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": usage_of(answer)})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(data).encode() + b"\n\n"


def logprobs_of(answer: Answer) -> list[dict[str, Any]]:
    """List each token with its log-prob, nats."""
    return [
        {"token": piece, "bytes": list(piece.encode("utf-8", "replace")), "logprob": float(value), "top_logprobs": []}
        for piece, value in zip(answer.pieces(), answer.logprobs, strict=True)
    ]


def usage_of(answer: Answer) -> dict[str, int]:
    """Return the token counts of the prompt, which includes earlier turns, and of the new turn."""
    told, said = len(answer.prompt_ids), len(answer.token_ids)
    return {"prompt_tokens": told, "completion_tokens": said, "total_tokens": told + said}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": answer.agent}
