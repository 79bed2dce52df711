"""Who plays which session, without a port: sessions that wait, workers that are lost, and which call goes on with a sample."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import AGENTS

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.gateway.agents import agents_of
from marsrl.rollout.gateway.calls import SESSION, Call, Reply
from marsrl.rollout.gateway.chats import Answer, Ask, Refused
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.history import History, Strand
from marsrl.rollout.gateway.session import CallLost, Session
from marsrl.rollout.gateway.workers import WORKER
from marsrl.rollout.types import Finish, ToolCall, ToolOutput


def submit(gateway: Gateway, name: str, purpose: str = "train") -> Future[ToolOutput]:
    return gateway.submit(ToolCall(f"{name}/{SESSION}", SESSION, json.dumps({"id": "p", "purpose": purpose})))


def gateway_of(**options: object) -> Gateway:
    return Gateway(ExternalConfig.model_validate({"command": ["true"], **options}), {})


def test_sessions_of_an_evaluation_do_not_wait_for_those_of_training() -> None:
    """With overlap these wait for the evaluation to end."""
    gateway = gateway_of()
    for name in ("1", "2", "3"):
        submit(gateway, name)
    submit(gateway, "4", "evaluate")
    sessions, _ = gateway.hand_out("worker", 2)
    assert [each.id for each in sessions] == ["1", "2", "4"]
    assert gateway.hand_out("worker", 2) == ([], [])
    gateway.end(sessions[0], {"reward": 1.0})
    assert [each.id for each in gateway.hand_out("worker", 2)[0]] == ["3"]


def test_a_lost_worker_s_sessions_begin_anew_and_its_keys_open_nothing() -> None:
    gateway = gateway_of(attempts=2)
    output = submit(gateway, "1")
    (first,), _ = gateway.hand_out("worker", 8)
    gateway.lose("worker", "it died")
    assert gateway.of_key(first.key) is None and gateway.take({"1"}).lost == ["1"]
    (second,), _ = gateway.hand_out("another", 8)
    assert second.key != first.key and second.attempt == 1 and not output.done()
    gateway.lose("another", "it died too")
    assert output.result().is_error and "external.attempts = 2" in output.result().text
    assert gateway.hand_out("third", 8) == ([], [])


def test_what_a_lost_session_asked_is_not_answered() -> None:
    gateway = gateway_of()
    for name in ("1", "2"):
        submit(gateway, name)
    first, second = gateway.hand_out("worker", 8)[0]
    for session in (first, second):
        session.send(Call(session.id, "solver", 0, 0, np.zeros(1, np.int32)))
    gateway.end(second, {})
    gateway.lose("worker", "it died")
    taken = gateway.take({"1", "2"})
    assert taken.lost == ["1"] and not taken.calls


def test_time_with_an_open_call_is_not_the_program_s_and_a_session_that_is_over_drops_its_calls(model: Path) -> None:
    """external.timeout_s bounds what is left; the seconds of a session are all."""
    now, sent, prompt = 50.0, list[Call](), np.arange(5, 9, dtype=np.int32)
    agents = agents_of(AGENTS, {"main": ChatRenderer(model)}, 1500)
    session = Session("1", {"purpose": "train"}, Future(), agents, sent.append, max_calls=3, clock=lambda: now)

    async def play() -> None:
        nonlocal now

        async def ask() -> asyncio.Task[Answer]:
            return await session.ask(Ask("solver", prompt=prompt), b"same", is_retry=False, is_long=False)

        session.start("worker")
        now += 3.0
        answer, other = await ask(), await ask()
        now += 40.0
        sent[0].reply.set_result(Reply("1/solver:0", prompt, np.zeros(4, np.float32), Finish.STOP))
        await answer
        now += 20.0
        assert session.seconds_alone() == 3.0  # the other one is open
        sent[1].reply.set_result(Reply("1/solver#1:0", prompt, np.zeros(4, np.float32), Finish.ERROR, "lost"))
        with pytest.raises(CallLost, match="lost"):
            await other
        now += 2.0
        assert session.seconds_alone() == 5.0
        last = await ask()
        now += 7.0
        session.cancel()
        await asyncio.wait([last], timeout=30.0)
        assert last.cancelled()
        now += 1.0
        assert session.seconds_alone() == 6.0

    asyncio.run(play())
    assert session.end({"reward": 0.5}).seconds == 73.0 and session.num_calls == 3


def test_messages_that_the_chat_template_refuses_are_refused_in_its_words(model: Path) -> None:
    renderer = ChatRenderer(model)
    renderer.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    agents = agents_of(AGENTS, {"main": renderer}, 1500)
    session = Session("1", {"purpose": "train"}, Future(), agents, lambda call: None, max_calls=3)
    ask = Ask("solver", [{"role": "user", "content": "3"}])
    with pytest.raises(Refused, match="agent solver does not take these messages: roles must alternate") as refused:
        asyncio.run(session.ask(ask, b"same", is_retry=False, is_long=False))
    assert refused.value.status == 400


def test_a_worker_is_one_file_of_python_3_9_and_its_standard_library() -> None:
    """It runs in environments that have nothing of ours."""
    tree = ast.parse(WORKER.read_text("utf-8"), feature_version=(3, 9))
    first, *_ = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert first.module == "__future__"  # annotations of later versions are never evaluated
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


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
