"""The gateway without a port: which sessions workers get, lost workers, and which call continues which sample."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from thinking_templates import TEMPLATES, renderer_of

from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.gateway import worker
from marsrl.rollout.gateway.calls import SESSION, Call, Origin, Reply, SessionEnd
from marsrl.rollout.gateway.chat_api import chat_message, read_chat
from marsrl.rollout.gateway.chats import Answer, Ask, Refused, Said
from marsrl.rollout.gateway.completions_api import read_completion, read_generate
from marsrl.rollout.gateway.config import ExternalConfig
from marsrl.rollout.gateway.gateway import Gateway
from marsrl.rollout.gateway.history import History, Strand
from marsrl.rollout.gateway.lineage import Lineages
from marsrl.rollout.gateway.messages_api import messages_reply, read_messages
from marsrl.rollout.gateway.responses_api import read_responses
from marsrl.rollout.gateway.session import CallLost, Session
from marsrl.rollout.gateway.vllm_reader import agents_of
from marsrl.rollout.gateway.worker import UNUSABLE, command_of
from marsrl.rollout.gateway.workers import WORKER
from marsrl.rollout.types import Fate, Finish, IntArray, Prefix, ToolCall, ToolOutput

NONE = np.zeros(0, np.float32)


def submit(gateway: Gateway, name: str, purpose: str = "train") -> Future[ToolOutput]:
    return gateway.submit(ToolCall(f"{name}/{SESSION}", SESSION, json.dumps({"id": "p", "purpose": purpose})))


def gateway_of(**options: object) -> Gateway:
    return Gateway(ExternalConfig.model_validate({"command": ["true"], **options}), {})


def test_evaluation_sessions_do_not_wait_for_training_ones() -> None:
    """With overlap, training sessions wait for the evaluation to end."""
    gateway = gateway_of()
    for name in ("1", "2", "3"):
        submit(gateway, name)
    submit(gateway, "4", "evaluate")
    sessions, _ = gateway.hand_out("worker", 2)
    assert [each.id for each in sessions] == ["1", "2", "4"]
    assert gateway.hand_out("worker", 2) == ([], [])
    gateway.end(sessions[0], {"reward": 1.0})
    assert [each.id for each in gateway.hand_out("worker", 2)[0]] == ["3"]


def test_sessions_of_a_lost_worker_restart_with_new_keys() -> None:
    gateway = gateway_of(attempts=2)
    output, _ = (submit(gateway, name) for name in ("1", "over"))
    first, over = gateway.hand_out("worker", 8)[0]
    for session in (first, over):
        session.send(Call(session.id, "solver", 0, 0, np.zeros(1, np.int32)))
    gateway.end(over, {})
    gateway.lose("worker", "it died")
    # Calls of lost and ended sessions are dropped.
    assert gateway.of_key(first.key) is None and gateway.take({"1", "over"}) == (["1"], [])
    (second,), _ = gateway.hand_out("another", 8)
    assert second.key != first.key and second.attempt == 1 and not output.done()
    gateway.lose("another", "it died too")
    assert output.result().is_error and "external.attempts = 2" in output.result().text
    assert gateway.hand_out("third", 8) == ([], [])


class Direct:
    """A session without a port, whose calls a test answers. now: seconds on its clock."""

    def __init__(self, model: Path | ChatRenderer, **settings: Any) -> None:
        self.now, self.sent = 7.0, list[Call]()
        self.renderer = ChatRenderer(model) if isinstance(model, Path) else model
        agents = agents_of({"solver": AgentConfig(**settings)}, {"main": self.renderer}, 1500)
        clock, lineages = (lambda: self.now), Lineages(3)
        self.session = Session("1", {"purpose": "train"}, Future(), agents, self.sent.append, 9, 2, clock, lineages)
        self.session.start("worker")

    async def ask(self, ask: Ask, body: bytes = b"", *, is_retry: bool = False) -> asyncio.Task[Answer]:
        return await self.session.ask(ask, body, is_retry=is_retry)

    def reply(self, uid: str, token_ids: Sequence[int], finish: Finish = Finish.STOP) -> None:
        """Answer the oldest open call."""
        call = next(call for call in self.sent if not call.reply.done())
        call.reply.set_result(Reply(uid, np.array(token_ids, np.int32), np.zeros(len(token_ids), np.float32), finish))

    async def answer(self, ask: Ask, uid: str, token_ids: Sequence[int], finish: Finish = Finish.STOP) -> Answer:
        task = await self.ask(ask)
        self.reply(uid, token_ids, finish)
        return await task


def of_tokens(*prompt: int) -> Ask:
    return Ask("solver", prompt=np.array(prompt, np.int32))


def test_a_program_is_not_charged_for_the_time_of_open_calls(model: Path) -> None:
    """external.timeout_s limits the time without open calls. The reported seconds of a session include open calls."""
    direct, ask = Direct(model), of_tokens(5, 6)
    session = direct.session

    async def play() -> None:
        direct.now += 20.0
        assert session.seconds_alone() == 20.0
        answer, other = await direct.ask(ask), await direct.ask(ask)
        direct.now += 40.0
        direct.reply("1/solver:0", [5, 6])
        await answer
        direct.now += 20.0
        assert session.seconds_alone() == 20.0  # the other call is still open
        direct.reply("1/solver#1:0", [], Finish.ERROR)
        with pytest.raises(CallLost):
            await other
        direct.now += 2.0
        assert session.seconds_alone() == 22.0
        last = await direct.ask(ask)
        direct.now += 7.0
        session.cancel()
        await asyncio.wait([last], timeout=30.0)
        assert last.cancelled()
        with pytest.raises(Refused, match="the session is over") as refused:
            await direct.ask(ask)
        assert refused.value.status == 401
        direct.now += 1.0
        assert session.seconds_alone() == 23.0

    asyncio.run(play())
    assert session.end({"reward": 0.5}).seconds == 90.0 and session.num_calls == 3


def test_a_retry_gets_the_first_unread_answer_without_a_call(model: Path) -> None:
    direct, ask = Direct(model), of_tokens(5, 6)

    async def play() -> None:
        tasks = [await direct.ask(ask, b"same") for _ in range(4)]
        assert len(set(tasks)) == 4
        for i in range(4):
            direct.reply(f"s#{i}:0", [5], Finish.ERROR if i == 0 else Finish.STOP)
        await asyncio.wait(tasks)
        # Each retry gets the next unread answer, never the lost one. Further retries get the last answer again.
        for task in (*tasks[1:], tasks[3]):
            assert await direct.ask(ask, b"same", is_retry=True) is task
            direct.session.note_read(task)
        assert await direct.ask(ask, b"another", is_retry=True) not in tasks

    asyncio.run(play())
    assert [(call.number, call.attempt) for call in direct.sent] == [(i, 2) for i in range(5)]
    end = SessionEnd.decode(direct.session.end({}).text)
    assert end.read == ["s#1:0", "s#2:0", "s#3:0"]
    assert end.fates == [Fate.UNREAD, Fate.READ, Fate.READ, Fate.READ, Fate.UNREAD]


FATES = {  # name: (events, fates of the answers: read, unread or superseded)
    "read": ("ask a, answer 0, read 0", "read"),
    "never answered": ("ask a, answer 0, read 0, ask a+0", "read unread"),
    "cut, sent again": ("ask a, gone 0, ask a, answer 0, answer 1, read 1", "unread read"),
    "cut, sent again, which came first": ("ask a, gone 0, ask a, answer 1, read 1, answer 0", "unread read"),
    "cut, sent again, and read after all": (
        "ask a, gone 0, ask a, answer 0, read 0, answer 1, read 1",
        "read read",
    ),
    "cut, and continued": ("ask a, answer 0, ask a+0, answer 1, read 1", "read read"),
    "lost by its engine": ("ask a, lose 0, ask a, answer 1, read 1", "unread read"),
    "discarded": ("ask a, answer 0, read 0, ask a, answer 1, read 1", "superseded read"),
    "discarded, and nothing came": ("ask a, answer 0, read 0, ask a", "superseded unread"),
    "discarded twice": (
        "ask a, answer 0, read 0, ask a, answer 1, read 1, ask a, answer 2, read 2",
        "superseded superseded read",
    ),
    "discarded in its second turn": (
        "ask a, answer 0, read 0, ask a+0, answer 1, read 1, ask a+0, answer 2, read 2, ask a+0+2, answer 3, read 3",
        "read superseded read read",
    ),
    "discarded beside one that was cut": (
        "ask a, gone 0, ask a, answer 1, read 1, ask a, answer 2, read 2, answer 0",
        "unread superseded read",
    ),
    "taken up later": (
        "ask a, answer 0, read 0, ask a, answer 1, read 1, ask a+0, answer 2, read 2",
        "read read read",
    ),
    "at once": ("ask a, ask a, answer 0, read 0, answer 1, read 1", "read read"),
    "four, two at once": (
        "ask a, ask a, answer 0, read 0, ask a, answer 1, read 1, ask a, answer 2, read 2, answer 3, read 3",
        "read read read read",
    ),
    "another body": ("ask a, answer 0, read 0, ask b, answer 1, read 1", "read read"),
}


async def happen(direct: Direct, events: str) -> list[Answer | None]:
    """Play the events, and return each call's answer. `a+0` is prompt a, followed by answer 0 and a new token."""
    tasks: list[asyncio.Task[Answer]] = []
    gone, answers = set[int](), dict[int, Answer]()
    for word, _, what in (event.partition(" ") for event in events.split(", ")):
        if word == "ask":
            first, *rest = what.split("+")
            prompt = [ord(first), *(token for i in rest for token in (100 + int(i), 7))]
            body, number = what.encode(), len(tasks)
            listens = lambda number=number: number not in gone  # noqa: E731
            tasks.append(await direct.session.ask(of_tokens(*prompt), body, is_retry=False, listens=listens))
            continue
        number = int(what)
        if word == "answer":
            call = direct.sent[number]
            reply = Reply(call.uid or f"s#{call.number}:0", np.array([100 + number], np.int32), NONE, Finish.STOP)
            call.reply.set_result(reply)
            answers[number] = await tasks[number]
        elif word == "lose":
            direct.sent[number].reply.set_result(Reply("s#0:0", np.zeros(0, np.int32), NONE, Finish.ERROR))
            await asyncio.wait([tasks[number]])
        elif word == "gone":
            gone.add(number)
        else:
            direct.session.note_read(tasks[number])
    direct.session.cancel()
    return [answers.get(number) for number in range(len(tasks))]


@pytest.mark.parametrize(("events", "fates"), FATES.values(), ids=FATES)
def test_what_a_program_did_with_an_answer_decides_its_fate(model: Path, events: str, fates: str) -> None:
    direct = Direct(model)
    asyncio.run(happen(direct, events))
    assert SessionEnd.decode(direct.session.end({"reward": 1.0}).text).fates == fates.split()


def test_superseded_answers_count_if_configured_or_rewarded(model: Path) -> None:
    events, _ = FATES["discarded twice"]
    for masks in (True, False):
        direct = Direct(model)
        direct.session.masks_superseded = masks
        answers = asyncio.run(happen(direct, events))
        of_agent = SessionEnd.decode(direct.session.end({"rewards": {"solver": 1.0}}).text)
        assert of_agent.fates == (["superseded"] * 2 if masks else ["read"] * 2) + ["read"]
        assert of_agent.read == (["s#2:0"] if masks else ["s#0:0", "s#1:0", "s#2:0"])
        assert answers[1] is not None
        end = SessionEnd.decode(direct.session.end({"rewards": {answers[1].id: 0.5}}).text)
        assert end.fates == ["superseded" if masks else "read", "read", "read"] and end.rewards == {"s#1:0": 0.5}


def test_limits_reject_prompts_and_busy_samples_are_not_extended(model: Path) -> None:
    direct = Direct(model, max_input_tokens=4, max_response_tokens=5)

    async def play() -> None:
        for prompt, reply in (([7, 7, 7, 7], [8]), ([5, 6], [9, 5])):
            await direct.answer(of_tokens(*prompt), f"{prompt}", reply)
        for prompt, message in (
            ([], "the prompt has 0 tokens; expected at least 1 and at most agents.solver.max_input_tokens = 4"),
            ([6, 6, 7, 8, 9], "the prompt has 5 tokens; expected .* at most agents.solver.max_input_tokens = 4"),
            ([5, 6, 9, 5, 6, 7, 8], "the sample would have 5 tokens after its first prompt; expected fewer than 5"),
        ):
            with pytest.raises(Refused, match=message) as refused:
                await direct.ask(of_tokens(*prompt))
            assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
        whole = [5, 6, 9, 5, 6, 7]
        assert (await direct.answer(of_tokens(*whole), "[5, 6]", [8])).prompt_ids.tolist() == whole
        await direct.answer(of_tokens(5), "s", [9])
        for prompt in ([5, 9, 6], [5, 9, 6, 7]):
            await direct.ask(of_tokens(*prompt))

    asyncio.run(play())
    asked = [(call.uid, call.token_ids.tolist()) for call in direct.sent[2:]]
    assert asked == [("[5, 6]", [6, 7]), ("", [5]), ("s", [6]), ("", [5, 9, 6, 7])]


def test_a_chat_reuses_its_tokens_and_closes_a_cut_off_turn(model: Path) -> None:
    direct = Direct(model)
    completion, end = direct.renderer.encode_trusted("4 6 5").tolist(), direct.renderer.eos_id

    async def play() -> None:
        for question, finish, ids in (("3", Finish.STOP, [*completion, end]), ("2", Finish.LENGTH, completion)):
            chat = [{"role": "user", "content": question}]
            answer = await direct.answer(Ask("solver", chat, stop=("5",)), question, ids, finish)
            assert answer.finish == finish and answer.said.content == "4 6 "
            chat.append({"role": "assistant", "content": answer.said.content})
            for word, uid in (("1", question), ("9", "other")):
                await direct.answer(Ask("solver", [*chat, {"role": "user", "content": word}]), uid, [5, end])

    asyncio.run(play())
    first, ended, beside, _, cut, _ = ([call.uid, *call.token_ids.tolist()] for call in direct.sent)
    assert first[0] == "" and ended[0] == "3" and cut == ["2", end, *ended[1:]]
    assert beside == ["", *first[1:], *completion, end, *ended[1:-2], *direct.renderer.encode_trusted("9"), ended[-1]]
    num_shared = len(first[1:]) + len(completion) + 1 + len(ended[1:-2])
    origins = SessionEnd.decode(direct.session.end({}).text).origins
    assert (origins["other"].parent, origins["other"].behind) == ("2", Prefix("2", num_shared))
    assert origins["3"] == Origin()


class ThoughtReader:
    """Splits a completion into its thought and the rest, as vLLM's parsers do."""

    reads_calls = False

    def __call__(self, text: str, token_ids: IntArray, ask: Ask) -> Said:
        thought, _, said = text.partition("</think>\n\n")
        return Said(said, thought.removeprefix("<think>"))


@pytest.mark.parametrize(("kind", "goes_on"), [("qwen3", False), ("r1", False), ("plain", True)])
def test_a_chat_whose_thoughts_a_template_leaves_out_begins_anew(kind: str, goes_on: bool, tmp_path: Path) -> None:
    """A chat is rendered as the template alone would render it, whether or not thoughts are parsed and sent back."""
    user, more = {"role": "user", "content": "3?"}, {"role": "user", "content": "and 5?"}
    renderer = renderer_of(TEMPLATES[kind], tmp_path)
    said = [*renderer.encode_trusted("<think>\nI add.\n</think>\n\n7").tolist(), renderer.eos_id]

    for reader, sends_back in ((None, True), (ThoughtReader(), True), (ThoughtReader(), False)):
        direct = Direct(renderer)
        agent = direct.session.agents["solver"]
        direct.session.agents = {"solver": replace(agent, reader=reader)}

        async def play(direct: Direct = direct, sends_back: bool = sends_back) -> None:
            chat = [user]
            for _ in range(3):
                answer = (await direct.answer(Ask("solver", chat), "s", said)).said
                thought = {} if answer.reasoning is None or not sends_back else {"reasoning": answer.reasoning}
                chat = [*chat, {"role": "assistant", "content": answer.content, **thought}, more]

        asyncio.run(play())
        assert [call.uid for call in direct.sent] == (["", "s", "s"] if goes_on else ["", "", ""])
        if not goes_on:
            chat = [user, {"role": "assistant", "content": "\n\n7" if kind == "r1" and reader is None else "7"}, more]
            assert direct.sent[1].token_ids.tolist() == renderer.render(chat)[0].tolist()
            assert "I add" not in renderer.decode(direct.sent[2].token_ids)


CALLED = {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}, "use tool_calls"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "the field refusal is unsupported: use content"),
        ({"role": "assistant", "content": "The answer", "prefix": True}, "the field prefix is unsupported"),
        ({"role": "assistant", "content": None, "tool_calls": [CALLED]}, "expected tool_calls of functions"),
        ({"role": "assistant", "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]}, "with a name"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "expected parts with a string as text"),
    ],
)
def test_a_message_part_that_would_be_lost_is_refused(message: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says) as refused:
        chat_message(message)
    assert refused.value.status == 400


def test_fields_of_messages_that_clients_send_empty_are_ignored() -> None:
    empty = {"function_call": None, "refusal": None, "audio": None, "prefix": False, "tool_calls": None}
    assert chat_message({"role": "assistant", "content": "7", **empty}) == {"role": "assistant", "content": "7"}


def test_a_prefilled_answer_of_the_messages_protocol_is_refused(model: Path) -> None:
    """Anthropic's clients expect the answer to continue the text, but a template would close that turn."""
    agents = Direct(model).session.agents
    chat = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "{"}]
    with pytest.raises(Refused, match="prefilled answers are unsupported"):
        read_messages({"model": "solver", "max_tokens": 9, "messages": chat}, agents)


def test_a_null_thought_is_empty(model: Path) -> None:
    agents, user = Direct(model).session.agents, {"role": "user", "content": "3"}
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": None}, {"type": "text", "text": "7"}]}
    item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": None}]}
    ask = read_messages({"model": "solver", "max_tokens": 9, "messages": [user, turn, user]}, agents)
    assert ask.messages[1]["reasoning"] == ""
    assert read_responses({"model": "solver", "input": [user, item, user]}, agents).messages[1]["reasoning"] == ""


def test_several_thoughts_of_a_response_are_all_kept(model: Path) -> None:
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in ("a", "b")]
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    items = [{"role": "user", "content": "3"}, *items, call, {"role": "user", "content": "4"}]
    ask = read_responses({"model": "solver", "input": items}, Direct(model).session.agents)
    assert [message.get("reasoning") for message in ask.messages] == [None, "ab", None]


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "a"}, {"reasoning": None, "reasoning_content": "a"}, {"reasoning": "a", "reasoning_content": "b"}],
)
def test_a_thought_is_read_by_each_of_its_names(fields: dict[str, Any]) -> None:
    message = chat_message({"role": "assistant", "content": "7", **fields})
    assert message["reasoning"] == message["reasoning_content"] == "a"


def test_a_thought_that_a_template_keeps_goes_on_with_its_tokens(tmp_path: Path) -> None:
    """Qwen3's template keeps thoughts until the next user message: a tool's output continues the sample, a question does not."""
    renderer = renderer_of(TEMPLATES["qwen3"], tmp_path)
    direct, user, more = Direct(renderer), {"role": "user", "content": "3?"}, {"role": "user", "content": "and 5?"}
    said = "<think>\nI add.\n</think>\n\nlook"
    ids = [*renderer.encode_trusted(said).tolist(), renderer.eos_id]

    async def play() -> None:
        chat = [user]
        for uid, new in (
            ("s", {"role": "tool", "content": "7"}),
            ("s", more),
            ("t", {"role": "tool", "content": "8"}),
            ("t", more),
        ):
            await direct.answer(Ask("solver", chat), uid, ids)
            chat = [*chat, {"role": "assistant", "content": said}, new]

    asyncio.run(play())
    assert [call.uid for call in direct.sent] == ["", "s", "", "t"]
    assert direct.sent[1].token_ids.tolist() == renderer.next_turn([{"role": "tool", "content": "7"}]).tolist()


def test_template_options_are_rendered_and_part_of_the_chat(tmp_path: Path) -> None:
    """An option in the request that equals the agent's own setting changes nothing."""
    renderer = renderer_of(TEMPLATES["qwen3"], tmp_path)
    direct = Direct(renderer, template_options={"enable_thinking": True})
    chat = [{"role": "user", "content": "3?"}]

    async def play() -> None:
        for uid, more in (("s", {}), ("s", {"enable_thinking": True}), ("t", {"enable_thinking": False}), ("t", None)):
            body = {"model": "solver", "messages": chat, "chat_template_kwargs": more}
            ask = read_chat(body, direct.session.agents)
            await direct.answer(ask, uid, [*renderer.encode_trusted("7").tolist(), renderer.eos_id])
            chat.extend([{"role": "assistant", "content": "7"}, {"role": "user", "content": "and?"}])

    asyncio.run(play())
    assert [call.uid for call in direct.sent] == ["", "s", "", "s"]
    thoughtless = renderer.render(chat[:5], enable_thinking=False)[0]
    assert direct.sent[2].token_ids.tolist() == thoughtless.tolist() and "</think>" in renderer.decode(thoughtless)


@pytest.mark.parametrize(
    ("server", "read", "body", "says"),
    [
        ("completions", read_chat, {"messages": [{}], "logprobs": True}, "returns neither token ids nor log-probs"),
        ("chat", read_chat, {"messages": [{}], "return_token_ids": True}, "returns neither token ids nor log-probs"),
        ("chat", read_completion, {"prompt": "3?"}, "supports only chats; use /v1/chat/completions"),
        ("completions", read_generate, {"token_ids": [5]}, "returns no token ids; use /v1/chat/completions"),
    ],
)
def test_an_agent_behind_a_server_gives_no_tokens(
    model: Path, server: str, read: Callable[..., Ask], body: dict[str, Any], says: str
) -> None:
    agents = agents_of({"solver": AgentConfig()}, {"main": ChatRenderer(model)}, 9, servers={"main": server})
    with pytest.raises(Refused, match=says) as refused:
        read({"model": "solver", **body}, agents)
    assert refused.value.status == 400


def test_a_stop_string_is_reported_and_kept_once_in_the_text(model: Path) -> None:
    direct = Direct(model)

    async def play() -> list[tuple[str, str | None]]:
        replies = []
        for prompt, said in (("3", "4 5"), ("34 5 6", "7 5"), ("34 5 67 8", "9")):
            ask = Ask("solver", prompt=prompt, stop=("5",))
            answer = await direct.answer(ask, "s", direct.renderer.encode_trusted(said).tolist())
            replies.append(messages_reply(answer, {}))
        return [(each["stop_reason"], each["stop_sequence"]) for each in replies]

    assert asyncio.run(play()) == [("stop_sequence", "5"), ("stop_sequence", "5"), ("end_turn", None)]
    assert [(call.uid, direct.renderer.decode(call.token_ids)) for call in direct.sent] == [
        ("", "3"),
        ("s", "6"),
        ("s", "8"),
    ]


def test_an_answer_ends_before_the_first_of_several_stop_strings(model: Path) -> None:
    """The last token may have more text than the stop string, which the client neither sees nor sends back."""
    direct = Direct(model)
    for said, stops in (("7 4 5", ("4 5", "5")), ("7 Answer:", ("Answer", "er"))):
        ask, ids = Ask("solver", prompt="3", stop=stops), direct.renderer.encode_trusted(said).tolist()
        answer = asyncio.run(direct.answer(ask, "s", ids))
        assert (answer.said.content, answer.stop) == ("7 ", stops[0])


def test_a_plain_prompt_gets_the_whole_text_with_its_thoughts(model: Path) -> None:
    """Such a client sends the text back; without the thoughts, the prompt would differ from the sample's tokens."""
    direct = Direct(model)
    agent = replace(direct.session.agents["solver"], reader=lambda *_: Said("5", "3 4"))
    direct.session.agents = {"solver": agent}

    async def play() -> list[str]:
        asks = (Ask("solver", prompt="3"), Ask("solver", prompt="33 4 56"), Ask("solver", [USER]))
        ids = direct.renderer.encode_trusted("3 4 5").tolist()
        return [(await direct.answer(ask, "s", ids)).said.content for ask in asks]

    assert asyncio.run(play()) == ["3 4 5", "3 4 5", "5"]
    assert [call.uid for call in direct.sent] == ["", "s", ""]


def test_rewards_are_averaged_over_answers_and_invalid_ones_fail(model: Path) -> None:
    direct = Direct(model)

    async def play() -> list[str]:
        asks = (of_tokens(5), "s:0"), (of_tokens(5, 6, 7), "s:0"), (of_tokens(8), "s#1:0")
        return [(await direct.answer(ask, uid, [6])).id for ask, uid in asks]

    one, two, other = asyncio.run(play())
    given = {"solver": 0.5, f"chatcmpl-{one}": 1.0, f"msg_{two}": 4.0, other: math.nan}
    end = SessionEnd.decode(direct.session.end({"rewards": given, "answer": 7}).text)
    assert math.isnan(end.rewards["s#1:0"]) and {**end.rewards, "s#1:0": 0} == {"solver": 0.5, "s:0": 2.5, "s#1:0": 0}
    assert (end.reward, end.answer) == (None, "7")
    invalid = [
        *({"reward": value} for value in ("x", [], math.inf)),
        *({"rewards": value} for value in ([1], {"x": 1})),
    ]
    for said in ({"error": "x"}, *invalid):
        output = direct.session.end(said)
        assert output.is_error and output.text.startswith("the program failed: ")


SHOWS = """{% for turn in messages %}{% if turn.role in ['user', 'assistant'] %}{{ turn.content + ' ' }}{% endif %}
{%- if turn.role == 'tool' %}{{ turn.content | tojson }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ("messages", "omitted"),
    [
        ([("system", "3"), ("user", "4")], "content of message 1 of 2, whose role is 'system'"),
        ([("user", "4"), ("critic", "5 6")], "content of message 2 of 2, whose role is 'critic'"),
        ([("user", "4"), ("system", " "), ("tool", 'a "b"\nc')], ""),
    ],
)
def test_a_message_that_the_template_omits_is_refused(
    model: Path, messages: list[tuple[str, str]], omitted: str
) -> None:
    """In a first call, and in a later one, whose new messages are rendered alone."""
    chat = [{"role": role, "content": content} for role, content in messages]

    async def play(begins: bool) -> str:
        direct = Direct(model)
        direct.renderer.tokenizer.chat_template = SHOWS
        if begins:
            await direct.ask(Ask("solver", chat))
        else:
            first = {"role": "user", "content": "3"}
            await direct.answer(Ask("solver", [first]), "s", direct.renderer.encode_trusted("7").tolist())
            await direct.ask(Ask("solver", [first, {"role": "assistant", "content": "7"}, *chat]))
        return direct.sent[-1].uid

    for begins in (True, False):
        if not omitted:
            assert asyncio.run(play(begins)) == ("" if begins else "s")
            continue
        with pytest.raises(
            Refused, match="agent solver rejects these messages: the chat template omits the " + omitted
        ):
            asyncio.run(play(begins))


def test_messages_the_template_rejects_fail_with_its_message(model: Path) -> None:
    direct = Direct(model)
    direct.renderer.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Refused, match="agent solver rejects these messages: roles must alternate") as refused:
        asyncio.run(direct.ask(Ask("solver", [USER])))
    assert refused.value.status == 400


def test_the_worker_file_needs_only_python_3_9_and_its_stdlib() -> None:
    """The worker runs in environments without our packages."""
    tree = ast.parse(WORKER.read_text("utf-8"), feature_version=(3, 9))
    first, *_ = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    assert first.module == "__future__"  # so annotations in the syntax of newer Pythons are never evaluated
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_single_text_or_message_is_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterating over a text would send each of its characters as a turn."""
    sent: list[Any] = []
    reply = {"id": "x", "choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]}
    monkeypatch.setattr(worker, "_request", lambda url, key, body, *more: sent.append(body["messages"]) or reply)
    client = worker.Client("http://x/v1", "k", "1", ["solver"])
    for messages in (USER["content"], USER, [USER["content"]], [USER], (USER,)):
        assert client.chat("solver", messages).text == "7"
    assert sent == [[USER]] * 5


def test_a_commands_json_may_contain_unusual_line_separators() -> None:
    """JSON strings may contain U+2028 and U+0085 as they are; only a newline ends the command's last line."""
    text = "Lima\u2028Peru\u0085"
    play = command_of([sys.executable, "-c", f"print('log'); print({json.dumps(text, ensure_ascii=False)!r})"])
    client = SimpleNamespace(base_url="http://x/v1", api_key="k", keyed_url="http://x/s/k/v1")
    assert play(SimpleNamespace(id="p"), client, lambda end: None) == text


def test_a_worker_without_a_program_says_so_and_exits_for_good() -> None:
    done = subprocess.run([sys.executable, str(WORKER), "--url", "http://127.0.0.1:1"], capture_output=True, text=True)
    assert done.returncode == UNUSABLE and done.stderr.startswith("no --function: ") and "Traceback" not in done.stderr


SYSTEM = {"role": "system", "content": "You solve."}
USER = {"role": "user", "content": "3 + 4?"}
NEXT = {"role": "user", "content": "And 5?"}
TEXT = {"role": "assistant", "content": " 7.\n"}
THOUGHT = {"role": "assistant", "content": "7", "reasoning": "I add."}
EMPTY = {"role": "assistant", "content": ""}


def call(name: str, arguments: Any = None) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments or {"a": 1e3}}}


CALLS = {"role": "assistant", "content": "", "tool_calls": [call("c1"), call("c2")]}
OUTPUTS = [{"role": "tool", "tool_call_id": name, "content": text} for name, text in (("c1", "7"), ("c2", "8"))]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def known(answer: dict[str, Any], tools: Any = TOOLS) -> tuple[History, Strand]:
    """Return a history with one answered call, and the strand of that call."""
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
    assert found is not None and found.behind is strand and found.is_tip and list(found.new) == new
    assert found.token_ids.tolist() == [1, 2, 3]


def test_of_two_equal_answers_the_last_goes_on() -> None:
    """A program may send the same request twice and get two equal answers."""
    history, first = known(TEXT)
    again = Strand(np.asarray([1, 2, 3], np.int32), 2, "s#1:0", is_busy=False, call=1)
    history.answered("solver", TOOLS, [SYSTEM, USER, TEXT], again)
    for busy, expected in ((None, again), (again, first), (first, None)):
        if busy is not None:
            busy.is_busy = True
        found = history.find("solver", TOOLS, [SYSTEM, USER, TEXT, NEXT])
        assert found is not None and found.is_tip == (expected is not None)
        assert (found.behind, found.call) == ((first, 0) if expected is first else (again, 1))


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
def test_a_chat_that_differs_begins_a_new_sample(agent: str, tools: Any, messages: list[dict[str, Any]]) -> None:
    history, _ = known(TEXT)
    assert history.find(agent, tools, messages) is None
