"""Chats are compared as clients write them back: which call goes on with a sample, and which begins one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marsrl.rollout.gateway.history import History, Strand

SYSTEM = {"role": "system", "content": "You solve."}
USER = {"role": "user", "content": "3 + 4?"}
NEXT = {"role": "user", "content": "And 5?"}
TEXT = {"role": "assistant", "content": " 7.\n"}
THOUGHT = {"role": "assistant", "content": "7", "reasoning": "I add."}
EMPTY = {"role": "assistant", "content": ""}


def call(name: str, arguments: Any = None) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments or {"a": 1e3}}}


CALLS = {"role": "assistant", "content": "", "tool_calls": [call("c1"), call("c2")]}
OUTPUTS = [
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "tool", "tool_call_id": "c2", "content": "8"},
]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def known(answer: dict[str, Any], tools: Any = TOOLS) -> tuple[History, Strand]:
    """A history with one answered call."""
    history, strand = History(), Strand(np.asarray([1, 2, 3], np.int32), 2, "s:0", is_busy=False)
    history.answered("solver", tools, [SYSTEM, USER, answer], strand)
    return history, strand


@pytest.mark.parametrize(
    ("answer", "echo", "new"),
    [
        (TEXT, [TEXT], [NEXT]),
        (CALLS, [CALLS], OUTPUTS),
        (CALLS, [{**CALLS, "tool_calls": [call("c1", '{"a": 1000.0}'), call("c2", "{}")]}], OUTPUTS),
        (CALLS, [{**CALLS, "tool_calls": [call("c2"), call("c1")]}], OUTPUTS),
        (THOUGHT, [THOUGHT], [NEXT]),
        (THOUGHT, [{"role": "assistant", "content": "7"}], [NEXT]),
        (EMPTY, [EMPTY], [NEXT]),
        (EMPTY, [], [NEXT]),
    ],
    ids=["text", "calls", "arguments anew", "calls in another order", "thought", "no thought", "empty", "left out"],
)
def test_a_chat_that_comes_back_as_clients_write_it_goes_on(
    answer: dict[str, Any], echo: list[dict[str, Any]], new: list[dict[str, Any]]
) -> None:
    history, strand = known(answer)
    found = history.find("solver", TOOLS, [SYSTEM, USER, *echo, *new])
    assert found is not None and found.strand is strand and list(found.new) == new
    assert found.token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("agent", "tools", "messages"),
    [
        ("verifier", TOOLS, [SYSTEM, USER, TEXT, NEXT]),
        ("solver", None, [SYSTEM, USER, TEXT, NEXT]),
        ("solver", TOOLS, [{**SYSTEM, "content": "You solve. It is noon."}, USER, TEXT, NEXT]),
        ("solver", TOOLS, [SYSTEM, USER, {**TEXT, "content": "7."}, NEXT]),
        ("solver", TOOLS, [SYSTEM, USER]),
        ("solver", TOOLS, [SYSTEM, USER, TEXT]),
        ("solver", TOOLS, [SYSTEM, {"role": "user", "content": "Summary: 7."}, NEXT]),
        ("solver", TOOLS, [SYSTEM, USER, TEXT, TEXT, NEXT]),
    ],
    ids=["agent", "tools", "system", "stripped", "same call", "nothing new", "summary", "two answers"],
)
def test_a_chat_that_is_another_begins_a_sample(agent: str, tools: Any, messages: list[dict[str, Any]]) -> None:
    history, _ = known(TEXT)
    assert history.find(agent, tools, messages) is None
