"""OpenAI's POST /v1/responses, as far as openai-agents needs it: each call has the whole input."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marsrl.rollout.gateway.chat_api import DRAWN, check_fields, event, read_chat, text_of, usage_of
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused

_SERVED = {"model", "instructions", "input", "tools", "tool_choice", "stream", "max_output_tokens"}
_SERVED |= {"stream_options", "parallel_tool_calls", "chat_template_kwargs"}


def read_responses(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request into the equivalent chat request. Raises Refused: it requests something unsupported, or is malformed."""
    check_fields(body, _SERVED)
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise Refused(400, "input: expected a string or a list of items")
    if body.get("instructions"):
        items = [{"role": "system", "content": body["instructions"]}, *items]
    functions = [
        {"type": tool.get("type"), "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in body.get("tools") or ()
    ]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    same = {name: body.get(name) for name in ("model", "parallel_tool_calls", "chat_template_kwargs", *DRAWN)}
    same["tool_choice"] = choice
    chat = {"messages": _messages(items), "tools": functions, "max_tokens": body.get("max_output_tokens")}
    return read_chat({**same, **chat}, agents)


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert items to messages: consecutive items of the assistant are one turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call_output":
            content = item.get("output")
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            continue
        if kind == "message" and item.get("role") != "assistant":
            turns.append({"role": item.get("role"), "content": item.get("content")})
            continue
        if not turns or turns[-1]["role"] != "assistant":
            turns.append({"role": "assistant", "content": ""})
        turn = turns[-1]
        if kind == "message":
            turn["content"] += text_of(item.get("content"))
        elif kind == "reasoning":
            thought = "".join(str(part.get("text") or "") for part in item.get("content") or ())
            turn["reasoning"] = turn.get("reasoning", "") + thought
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
        else:
            raise Refused(400, f"input: items of type {kind!r} are unsupported")
    return turns


def responses_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    turn, done = answer.said, {"status": "completed"}
    output: list[dict[str, Any]] = []
    if turn.reasoning:
        thought = [{"type": "reasoning_text", "text": turn.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": thought})
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": []}
        output.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": [part], **done})
    for call in turn.calls:
        function = {"call_id": call["id"], **call["function"]}
        output.append({"type": "function_call", "id": f"fc_{call['id']}", **function, **done})
    usage, is_cut = usage_of(answer), answer.finish == "length"
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.agent,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def responses_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Render the answer as the final event that clients wait for."""
    response = responses_reply(answer, body)
    kind = f"response.{response['status']}"
    yield event({"type": kind, "sequence_number": 0, "response": response}, kind)
