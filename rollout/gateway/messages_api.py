"""Anthropic's POST /v1/messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marsrl.rollout.gateway.chat_api import DRAWN, check_fields, event, read_chat, text_of
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.gateway.history import ChatMessage

_SERVED = {"model", "messages", "system", "max_tokens", "tools", "tool_choice", "stop_sequences", "stream"}
_SERVED |= {"chat_template_kwargs"}
_ATTRIBUTION = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
"""First line of Claude Code's system prompts. It differs between requests, and vLLM omits it too."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_messages(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request into the equivalent chat request. Raises Refused: it requests something unsupported, or is malformed."""
    check_fields(body, _SERVED)
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(each, Mapping) for each in given):
        raise Refused(400, "messages: expected a list of at least one message")
    if given[-1].get("role") == "assistant":
        raise Refused(
            400, "messages: the last one is the assistant's, but prefilled answers are unsupported; end with the user's"
        )
    turns: list[ChatMessage] = []
    system = _ATTRIBUTION.sub("", text_of(body.get("system")))
    if system:
        turns.append({"role": "system", "content": system})
    turns += [turn for message in given for turn in _turns(message)]
    functions = [
        {
            "type": "function" if "input_schema" in tool else tool.get("type"),
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description"),
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in body.get("tools") or ()
    ]
    asked = body.get("tool_choice") or {"type": "auto"}
    if not isinstance(asked, Mapping):
        raise Refused(400, f"tool_choice is {json.dumps(asked)[:200]}; expected an object")
    choice: Any = dict(asked)
    in_parallel = choice.pop("disable_parallel_tool_use", None) is not True
    if choice.get("type") == "tool":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    else:
        choice = {"any": "required"}.get(choice.get("type"), choice.get("type") or choice)
    same = {name: body.get(name) for name in ("model", "max_tokens", "chat_template_kwargs", *DRAWN)}
    chat = {"messages": turns, "tools": functions, "tool_choice": choice, "stop": body.get("stop_sequences")}
    chat["parallel_tool_calls"] = in_parallel
    return read_chat({**same, **chat}, agents)


def _turns(message: Mapping[str, Any]) -> Sequence[ChatMessage]:
    """Convert a message to OpenAI's chat format: tool outputs become separate messages, before accompanying text."""
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    by_type: dict[str, list[Any]] = {kind: [] for kind in ("text", "tool_use", "tool_result", "thinking")}
    for block in blocks:
        if block.get("type") not in by_type:
            raise Refused(
                400, f"messages: expected blocks of type {', '.join(by_type)}; found {json.dumps(blocks)[:200]}"
            )
        by_type[block["type"]].append(block)
    texts, uses, results, thinking = by_type.values()
    outputs = [
        {"role": "tool", "tool_call_id": each.get("tool_use_id"), "content": text_of(each.get("content"))}
        for each in results
    ]
    calls = [
        {"id": each.get("id"), "function": {"name": each.get("name"), "arguments": each.get("input")}} for each in uses
    ]
    thoughts = [str(each.get("thinking") or "") for each in thinking]
    turn: dict[str, Any] = {"role": message.get("role"), "content": text_of(texts)}
    turn |= {"tool_calls": calls} if calls else {}
    turn |= {"reasoning": "".join(thoughts)} if thoughts else {}
    return [*outputs, *([turn] if texts or calls or thoughts or not outputs else [])]


def messages_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    turn = answer.said
    content: list[dict[str, Any]] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.content or not turn.calls:
        content.append({"type": "text", "text": turn.content})
    for call in turn.calls:
        arguments = json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.agent,
        "content": content,
        "stop_reason": "stop_sequence" if answer.stop and not turn.calls else _STOP_REASONS[answer.finish],
        "stop_sequence": answer.stop or None,
        "usage": {"input_tokens": len(answer.prompt_ids), "output_tokens": len(answer.token_ids)},
    }


def messages_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Render the answer as the events of a streamed message."""
    whole = messages_reply(answer, body)

    def named(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    yield named("message_start", message={**whole, "content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(whole["content"]):
        start, delta = _start_and_delta(block)
        yield named("content_block_start", index=index, content_block=start)
        yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield named("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
    yield named("message_stop")


def _start_and_delta(block: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if block["type"] == "tool_use":
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    if block["type"] == "thinking":
        return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
