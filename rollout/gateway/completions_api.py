"""OpenAI's POST /v1/completions, with text or tokens, and vLLM's /inference/v1/generate, with tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from marsrl.rollout.gateway.chat_api import agent_of, check_fields, event, stops_of, usage_of, whole_number
from marsrl.rollout.gateway.chats import Agent, Answer, Ask, Refused
from marsrl.rollout.types import IntArray

_COMPLETIONS = {"model", "prompt", "max_tokens", "stop", "stream", "stream_options", "logprobs", "return_token_ids"}
_GENERATE = {"model", "token_ids", "sampling_params", "stream", "request_id"}
_SAMPLING = {"max_tokens", "stop", "logprobs", "skip_special_tokens", "spaces_between_special_tokens"}


def read_completion(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request. Raises Refused: it requests something unsupported, or is malformed."""
    check_fields(body, _COMPLETIONS)
    agent, prompt = _agent_of(body, agents), body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if not isinstance(prompt, str):
        prompt = _token_ids("prompt", prompt, agent)
    if body.get("logprobs") not in (None, 0, 1):
        asked = json.dumps(body["logprobs"])[:200]
        raise Refused(400, f"logprobs={asked} is unsupported; use 0 or 1, for the log-probs of the sampled tokens")
    max_tokens = whole_number(body, "max_tokens")
    return Ask(agent.name, prompt=prompt, max_tokens=max_tokens, stop=stops_of(body.get("stop")), calls_tools=False)


def _agent_of(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Agent:
    agent = agent_of(body, agents)
    if agent.server == "chat":
        raise Refused(400, f"agent {agent.name} is on a server that supports only chats; use /v1/chat/completions")
    return agent


def completion_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Render the answer as a text_completion."""
    logprobs = None
    if body.get("logprobs") is not None:
        values = [float(value) for value in answer.logprobs]
        logprobs = {"tokens": answer.pieces(), "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    choice = {"index": 0, "text": answer.said.content, "finish_reason": answer.finish, "logprobs": logprobs}
    if body.get("return_token_ids"):
        choice |= {"prompt_token_ids": answer.prompt_ids.tolist(), "token_ids": answer.token_ids.tolist()}
    head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": int(time.time()), "model": answer.agent}
    return {**head, "choices": [choice], "usage": usage_of(answer)}


def completion_events(answer: Answer, body: Mapping[str, Any]) -> Iterator[bytes]:
    """Render the answer as a single event."""
    whole = completion_reply(answer, body)
    usage = whole.pop("usage")
    yield event(whole)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**whole, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def read_generate(body: Mapping[str, Any], agents: Mapping[str, Agent]) -> Ask:
    """Parse a request as read_completion does, for token ids."""
    sampling = body.get("sampling_params") or {}
    check_fields(body, _GENERATE)
    check_fields(sampling, _SAMPLING)
    if (sampling.get("logprobs") or 0) > 1 or body.get("stream"):
        raise Refused(400, "sampling_params.logprobs above 1 and stream are unsupported; omit them")
    agent = _agent_of({**sampling, "model": body.get("model")}, agents)
    if agent.server:
        why = "is on a server, which returns no token ids; use /v1/chat/completions"
        raise Refused(400, f"agent {agent.name} {why}")
    return Ask(
        agent.name,
        prompt=_token_ids("token_ids", body.get("token_ids"), agent),
        max_tokens=whole_number(sampling, "max_tokens"),
        stop=stops_of(sampling.get("stop")),
        calls_tools=False,
    )


def generate_reply(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Render the answer as vLLM's GenerateResponse, with the log-prob of each token."""
    token_ids = answer.token_ids.tolist()
    logprobs = [
        {"token_id": token, "logprob": float(value), "top_logprobs": []}
        for token, value in zip(token_ids, answer.logprobs, strict=True)
    ]
    choice = {"index": 0, "token_ids": token_ids, "finish_reason": answer.finish, "logprobs": {"content": logprobs}}
    head = {"request_id": answer.id, "model": answer.agent, "created": int(time.time()), "output_mode": "tokens"}
    return {**head, "choices": [choice], "usage": usage_of(answer)}


def _token_ids(name: str, given: Any, agent: Agent) -> IntArray:
    size = agent.renderer.vocab_size
    is_ids = isinstance(given, list) and all(isinstance(each, int) and 0 <= each < size for each in given)
    if not is_ids or not given:
        raise Refused(
            400,
            f"{name} is {json.dumps(given)[:100]}; expected a list of token ids below {size} (a prompt may be a string)",
        )
    return np.asarray(given, np.int32)
