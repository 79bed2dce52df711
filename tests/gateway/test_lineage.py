"""Lineages of a session's samples: shared prefixes, tool calls with new ids, successors, sub-agents and their callers."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from multidict import CIMultiDict

from marsrl.rollout.gateway import lineage
from marsrl.rollout.gateway.calls import Origin
from marsrl.rollout.gateway.chats import Ask, Refused
from marsrl.rollout.gateway.history import History, Strand
from marsrl.rollout.gateway.lineage import Lineages, Prefixes, names_of
from marsrl.rollout.gateway.messages_api import read_messages
from marsrl.rollout.types import Caller, Prefix

SUMMARY = (
    "The parser fails on an empty list, in line 31, since the grammar was changed; the next step is a test for it."
)


def strand_of(*token_ids: int) -> Strand:
    return Strand(np.array(token_ids, np.int32), len(token_ids))


def test_the_longest_shared_prefix_is_exact() -> None:
    coin = random.Random(0)
    for _ in range(40):
        prefixes, strands = Prefixes(), list[Strand]()
        for _ in range(30):
            tokens = [coin.choice((0, 1, 300)) for _ in range(coin.randrange(1, 9))]
            if strands and coin.random() < 0.4:
                prefixes.extend(coin.choice(strands), np.array(tokens, np.int32))
                continue
            new = strand_of(*tokens)
            found = prefixes.longest(new.token_ids)
            shared = [common(strand.token_ids.tolist(), tokens) for strand in strands]
            assert (0 if found is None else found[1]) == max(shared, default=0)
            assert found is None or shared[strands.index(found[0])] == found[1]
            prefixes.add(new)
            strands.append(new)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def test_a_search_looks_at_few_of_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes, looked = Prefixes(), list[Strand]()
    key = lineage._key
    monkeypatch.setattr(lineage, "_key", lambda strand: (looked.append(strand), key(strand))[1])
    for number in range(512):
        new = strand_of(7, number % 16, number)
        prefixes.longest(new.token_ids)
        prefixes.add(new)
    assert len(looked) < 512 * 24


class Session:
    """Calls of a session, without a model: a call's prompt is a list of made-up tokens, and its answer is one token."""

    def __init__(self, most_names: int = 9) -> None:
        self.lineages, self.num_calls = Lineages(most_names), 0

    def begin(self, uid: str, *prompt: int, chat: Any = "", answers: int = 0, **fields: Any) -> Strand:
        """Begin a sample with an open first call. chat: the user's text. answers: number of answers before that text."""
        said = [{"role": "assistant", "content": "ok"}] * answers
        ask = Ask(fields.pop("agent", "solver"), [*said, {"role": "user", "content": chat}], **fields)
        self.lineages.check(ask)
        self.last = ask, strand_of(*prompt), self.num_calls
        self.lineages.begin(*self.last)
        self.last[1].uid = uid
        self.num_calls += 1
        return self.last[1]

    def answer(self, text: str = "", call: Any = None) -> None:
        ask, strand, number = call or self.last
        message = {"role": "assistant", "content": text}
        self.lineages.answer(ask, strand, number, np.array([99], np.int32), message, self.num_calls)

    def one(self, uid: str, *prompt: int, text: str = "", **fields: Any) -> Strand:
        """Begin a sample and answer its first call; return the sample's strand."""
        strand = self.begin(uid, *prompt, **fields)
        self.answer(text)
        return strand

    def go_on(self, strand: Strand, text: str = "", **fields: Any) -> None:
        self.last = Ask("solver", **fields), strand, self.num_calls
        self.lineages.go_on(*self.last, np.array([98], np.int32))
        self.num_calls += 1
        self.answer(text)

    def callers(self) -> dict[str, Caller | None]:
        return {uid: origin.caller for uid, origin in self.lineages.settle().origins.items()}


def test_a_sub_agents_caller_waits_around_it() -> None:
    session = Session()
    main = session.one("main", 1)
    for number in range(2):
        session.one(f"sub{number}", 2, number, agent="helper")
        session.go_on(main)
    session.one("last", 3)
    assert session.callers() == {"main": None, "sub0": Caller("main", 1), "sub1": Caller("main", 3), "last": None}
    assert session.lineages.settle().origins["sub0"] == Origin("main", None, Caller("main", 1))


def test_a_sample_without_a_unique_caller_has_none() -> None:
    """A nested sample has no caller, because two would fit. Parallel samples do not call each other, because neither waits."""
    session = Session()
    main = session.one("main", 1)
    sub = session.one("sub", 2)
    session.one("nested", 3)
    session.go_on(sub)
    session.go_on(main)
    assert session.callers() == {"main": None, "sub": Caller("main", 1), "nested": None}
    session = Session()
    main = session.one("main", 1)
    one, other = ((session.begin(name, 2, i), session.last)[::-1] for i, name in enumerate(("one", "other")))
    session.answer(call=one[0])
    session.answer(call=other[0])
    session.go_on(one[1])
    session.go_on(other[1])
    session.go_on(main)
    assert session.callers() == {"main": None, "one": Caller("main", 1), "other": Caller("main", 1)}


def test_a_caller_makes_no_call_while_its_sub_agent_does() -> None:
    """The first sub-agent, answered before the second one began, continues beside it, so it is not the second one's caller."""
    session = Session()
    main, one = session.one("main", 1), session.one("one", 2)
    other = session.one("other", 3)
    for strand in (one, other, main):
        session.go_on(strand)
    assert session.callers() == {"main": None, "one": Caller("main", 1), "other": Caller("main", 1)}


def test_a_callers_answer_comes_before_its_sub_agent() -> None:
    """The main agent's second call is still open when the sample begins, so the main agent did not start it."""
    session = Session()
    main = session.one("main", 1)
    session.lineages.go_on(Ask("solver"), main, 1, np.array([98], np.int32))
    session.num_calls += 1
    session.one("beside", 2)
    session.answer(call=(Ask("solver"), main, 1))
    session.go_on(main)
    assert session.callers()["beside"] is None


def test_headers_name_the_caller_of_nested_sub_agents() -> None:
    session = Session()
    main = session.one("main", 1)
    sub = session.one("sub", 2, lineage="s")
    session.one("nested", 3, lineage="n", caller="s")
    session.one("of unknown", 4, lineage="u", caller="x")
    session.go_on(sub, lineage="s")
    session.go_on(main)
    callers = session.callers()
    assert callers["nested"] == Caller("sub", 2) and callers["sub"] == Caller("main", 1)
    assert callers["of unknown"] is None  # ambiguous: two callers fit
    assert set(session.lineages.settle().named) == {"s", "n", "u"}


def test_calls_of_one_name_are_one_lineage() -> None:
    session = Session()
    session.one("a", 1, lineage="x")
    session.one("b", 2, lineage="x", text=SUMMARY)
    session.one("c", 3, lineage="y", chat=SUMMARY)  # a named lineage is separate, even if the chat shows a summary
    lineages = session.lineages.settle().lineages
    assert lineages["a"] is lineages["b"] is not lineages["c"]


@pytest.mark.parametrize(
    ("chat", "agent", "goes_on", "follows"),
    [
        (f"So far: {SUMMARY}", "solver", False, True),
        (f"So far: {SUMMARY[20:]}", "solver", False, True),  # the summary lacks its beginning
        (f"So far: {SUMMARY[:40]}", "solver", False, False),
        (f"Is it right? {SUMMARY}", "verifier", False, False),
        # The first context goes on, so the other sample is a sub-agent.
        (f"Is it right? {SUMMARY}", "solver", True, False),
    ],
    ids=["summary", "cut summary", "too short", "another agent", "the first goes on"],
)
def test_a_chat_with_an_answer_in_it_follows_its_sample(chat: str, agent: str, goes_on: bool, follows: bool) -> None:
    session = Session()
    first = session.one("first", 1, text=f"<think>Hm.</think>\n{SUMMARY}\n")
    session.one("then", 2, chat=chat, agent=agent)
    if goes_on:
        session.go_on(first)
    settled = session.lineages.settle()
    assert (settled.lineages["then"] is settled.lineages["first"]) == follows
    assert settled.origins["then"].caller == (Caller("first", 1) if goes_on else None)


REWARDS = {  # name: (rewards by agent, by lineage and by answer; expected rewards of samples)
    "of agents": ({"solver": 1.0, "helper": 0.5}, {}, [], {"nested": 0.5}),
    "of answers": (
        {"solver": 1.0, "helper": 0.5},
        {},
        [("sub", 2.0), ("sub", 4.0)],
        dict.fromkeys(("sub", "then", "nested"), 3.0),
    ),
    "of one of two samples": ({}, {}, [("sub", 2.0), ("then", 4.0)], {"sub": 2.0, "then": 4.0, "nested": 4.0}),
    "of a lineage": ({"helper": 0.5}, {"s": 2.0}, [("sub", 4.0)], {"sub": 4.0, "then": 2.0, "nested": 2.0}),
    "of the caller": ({"solver": 1.0}, {}, [], dict.fromkeys(("sub", "then", "nested"), 1.0)),
    "of the caller's answer": ({}, {}, [("main", 1.0)], dict.fromkeys(("main", "sub", "then", "nested"), 1.0)),
    "of the nearest caller": ({"solver": 1.0}, {"s": 2.0}, [], {"sub": 2.0, "then": 2.0, "nested": 2.0}),
    "none": ({}, {}, [], {}),
}


@pytest.mark.parametrize(("by_agent", "by_name", "answers", "expected"), REWARDS.values(), ids=REWARDS)
def test_a_sample_gets_the_first_reward_that_is_given(
    by_agent: dict[str, float], by_name: dict[str, float], answers: list[tuple[str, float]], expected: dict[str, float]
) -> None:
    """A sample gets the reward of its answers; else of its lineage; else of its agent; else of its caller."""
    session = Session()
    main = session.one("main", 1, lineage="m")
    for uid in ("sub", "then"):
        session.one(uid, 2, agent="helper", lineage="s", caller="m")
    session.one("nested", 3, agent="nested", lineage="n", caller="s")
    session.go_on(main)
    settled = session.lineages.settle()
    by_lineage = {settled.named[name]: [value] for name, value in by_name.items()}
    assert settled.rewards(by_agent, by_lineage, answers) == by_agent | expected


@pytest.mark.parametrize(("agent", "expected"), [("solver", {"check": 2.0}), ("verifier", {})])
@pytest.mark.parametrize("is_sent_back", [True, False])
def test_an_inferred_caller_rewards_only_its_own_agent(
    agent: str, expected: dict[str, float], is_sent_back: bool
) -> None:
    """A Verifier's reward must not depend on whether the Solver is called after it."""
    session = Session()
    main = session.one("main", 1)
    session.one("check", 2, agent=agent)
    if is_sent_back:
        session.go_on(main)
    found = session.lineages.settle().rewards({}, {}, [("main", 2.0)])
    assert found == {"main": 2.0} | (expected if is_sent_back else {})


def test_nan_is_left_out_of_means_of_answers() -> None:
    session = Session()
    main = session.one("main", 1)
    for uid in ("sub", "again"):
        session.one(uid, 2, lineage="s", caller="m")
    session.go_on(main)
    rewards = session.lineages.settle().rewards
    none = float("nan")
    assert rewards({}, {}, [("sub", 1.0), ("sub", none)]) == {"sub": 1.0, "again": 1.0}
    found = rewards({"solver": 0.5}, {}, [("sub", none)])
    assert math.isnan(found.pop("sub")) and found == {"solver": 0.5}


def test_names_that_share_a_sample_share_their_mean_reward() -> None:
    session = Session()
    session.go_on(session.one("a", 1, lineage="a"), lineage="b")
    settled = session.lineages.settle()
    assert settled.named["a"] is settled.named["b"]
    assert settled.rewards({}, {settled.named["a"]: [1.0, 0.5]}, []) == {"a": 0.75}


def test_an_agents_reward_holds_in_a_lineage_that_nothing_called() -> None:
    session = Session()
    session.one("first", 1)
    session.one("rewritten", 1, 2, answers=1)
    rewards = session.lineages.settle().rewards
    assert rewards({"solver": 0.5}, {}, [("first", 2.0)]) == {"solver": 0.5, "first": 2.0}
    assert rewards({}, {}, [("first", 2.0)]) == {"first": 2.0, "rewritten": 2.0}


def test_turn_rewards_replace_and_do_not_become_other_rewards() -> None:
    session = Session()
    main = session.one("main", 1)
    session.one("sub", 2, agent="helper")
    session.go_on(main)
    rewards = session.lineages.settle().rewards
    assert rewards({"solver": 1.0}, {}, [], ["helper"]) == {"solver": 1.0, "helper": 0.0}
    assert rewards({}, {}, [], ["solver"]) == {"solver": 0.0}


def test_a_problem_that_an_answer_repeats_is_no_summary() -> None:
    """Two samples that answer the same long problem, and repeat it, are two lineages, so they do not share a reward."""
    session = Session()
    for uid in ("one", "two"):
        session.one(uid, 1, chat=SUMMARY, text=f"{SUMMARY} So it is 5.")
    lineages = session.lineages.settle().lineages
    assert lineages["one"] is not lineages["two"]
    session.one("then", 2, chat=f"{SUMMARY} So far: {SUMMARY} So it is 5.")
    lineages = session.lineages.settle().lineages
    assert lineages["then"] is lineages["two"]


def test_a_chain_of_summaries_is_one_lineage_with_one_caller() -> None:
    session = Session()
    main = session.one("main", 1)
    for number in range(3):
        chat = f"So far: {number - 1} {SUMMARY}" if number else ""
        session.one(f"sub{number}", 2, number, text=f"{number} {SUMMARY}", chat=chat)
    session.go_on(main)
    settled = session.lineages.settle()
    assert len({id(settled.lineages[f"sub{number}"]) for number in range(3)}) == 1
    assert [settled.origins[f"sub{number}"].parent for number in range(3)] == ["main", "sub0", "sub1"]
    assert {settled.origins[f"sub{number}"].caller for number in range(3)} == {Caller("main", 1)}


def test_a_chat_that_shows_more_answers_was_rewritten() -> None:
    """A new chat that shares only its beginning with another, such as a system prompt, does not count as rewritten."""
    session = Session()
    session.one("first", 1, 2, 3)
    session.one("rewritten", 1, 2, 4, answers=1)
    session.one("fresh", 1, 2, 5)
    settled = session.lineages.settle()
    origins, lineages = settled.origins, settled.lineages
    assert lineages["rewritten"] is lineages["first"] is not lineages["fresh"]
    assert origins["rewritten"].parent == "first" and origins["fresh"].parent == ""
    assert origins["rewritten"].behind == Prefix("first", 2) and origins["fresh"].behind.num_tokens == 2


def test_a_name_too_many_is_refused_and_known_ones_are_not() -> None:
    session = Session(most_names=2)
    for name in ("a", "b"):
        session.one(name, 1, lineage=name)
    with pytest.raises(Refused, match=r"external\.max_lineages = 2; raise it") as refused:
        session.one("c", 1, lineage="c")
    assert refused.value.status == 429
    session.one("a2", 1, lineage="a")
    session.one("unnamed", 1)


@pytest.mark.parametrize(
    ("headers", "names"),
    [
        ({}, ("", "")),
        ({"x-claude-code-agent-id": "a1"}, ("a1", "")),
        ({"X-Claude-Code-Agent-Id": "a2", "X-Claude-Code-Parent-Agent-Id": "a1"}, ("a2", "a1")),
        ({"thread-id": "t2", "x-codex-parent-thread-id": "t1", "x-openai-subagent": "review"}, ("t2", "t1")),
        ({"x-codex-window-id": "t2:0"}, ("t2", "")),
        ({"X-Session-Id": "s2", "x-parent-session-id": "s1"}, ("s2", "s1")),
        ({"X-Session-Id": "s2", "X-Marsrl-Lineage": "own"}, ("own", "")),
        ({"X-Session-Id": "s" * 129, "x-parent-session-id": "s\x00"}, ("", "")),
        ({"X-Session-Id": "\udcff", "x-parent-session-id": "s" * 128}, ("", "s" * 128)),
    ],
)
def test_headers_of_harnesses_give_names(headers: dict[str, str], names: tuple[str, str]) -> None:
    assert names_of(CIMultiDict(headers)) == names


@pytest.mark.parametrize("header", ["X-Marsrl-Lineage", "X-Marsrl-Lineage-Parent"])
@pytest.mark.parametrize("value", ["n" * 129, "a\tb", "\udc80"], ids=["long", "control", "bytes"])
def test_an_unusable_name_in_our_headers_is_refused(header: str, value: str) -> None:
    with pytest.raises(
        Refused, match=f"{header} has {len(value)} characters; expected at most 128, all printable"
    ) as refused:
        names_of(CIMultiDict({header: value}))
    assert refused.value.status == 400


USER = {"role": "user", "content": "3 + 4?"}


def called(*names: Any, arguments: Any = '{"a": 1e3}') -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": "add", "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def output(name: str | None, text: str = "7") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def known(*answers: dict[str, Any]) -> History:
    """Return a history of one chat. Each answer is a sample of its own; a tool's output follows every answer but the last."""
    history, chat = History(), [USER]
    for number, answer in enumerate(answers):
        chat = [*chat, answer]
        history.answered("solver", None, chat, Strand(np.array([1, 2]), 1, f"s{number}", is_busy=False, call=number))
        chat.append(output(answer["tool_calls"][0]["id"]))
    return history


@pytest.mark.parametrize(
    ("turns", "call"),
    [
        ([called("n1", "n2"), output("n1"), output("n2")], 0),
        ([called("n1", "n2", arguments={"a": 1000.0}), output("n2"), output("n1")], 0),
        ([called("c1", "n2"), output("c1")], 0),
        ([called(None, None), output(None)], 0),
        ([called("n1", "n2"), output("n1"), called("n3"), output("n3")], 1),
        ([called("c1", "c2"), output("c1"), called("n3"), output("n3")], 1),
        ([called("n1", "n2"), output("n2"), called("n3"), output("n3")], 0),
        ([called("n1", "n2", arguments='{"a": 2}'), output("n1")], None),
        ([called("c3", "n2"), output("c3")], None),
        ([called("c2", "n1"), output("n1")], None),
        ([called("n1"), output("n1")], None),
    ],
    ids=["anew", "arguments reformatted", "one anew", "no ids", "twice", "the last one", "another output's", "other arguments",
         "of another turn", "in another place", "fewer"],
)  # fmt: skip
def test_calls_with_new_ids_are_compared_by_place(turns: list[dict[str, Any]], call: int | None) -> None:
    found = known(called("c1", "c2"), called("c3")).find("solver", None, [USER, *turns])
    assert (None if found is None else found.call) == call


def test_calls_without_ids_are_compared_by_what_they_say() -> None:
    """Such calls occur in examples that a program puts before its first call."""
    answer, history = {"role": "assistant", "content": "7"}, History()
    strand = Strand(np.array([1, 2]), 1, "s", is_busy=False)
    history.answered("solver", None, [USER, called(None), output(None), answer], strand)
    for arguments, goes_on in (('{"a": 1000.0}', True), ('{"a": 2}', False)):
        chat = [USER, called(None, arguments=arguments), output(None), answer, USER]
        assert (history.find("solver", None, chat) is not None) == goes_on


def test_new_ids_are_replaced_by_the_ids_that_calls_had() -> None:
    history = known(called("c1", "c2"))
    found = history.find("solver", None, [USER, called("n1", "n2"), output("n2"), output("n1")])
    assert found is not None and list(found.answered) == [USER, called("c1", "c2")]
    assert list(found.new) == [output("c2"), output("c1")]


def test_ids_that_begin_again_in_each_turn_are_replaced_by_turn() -> None:
    history = known(called("c1"), called("c2"))
    found = history.find("solver", None, [USER, called("n"), output("n"), called("n"), output("n")])
    assert found is not None and list(found.answered) == [USER, called("c1"), output("c1"), called("c2")]
    assert list(found.new) == [output("c2")]


def test_a_users_turn_after_calls_without_ids_goes_on() -> None:
    answer, history = {"role": "assistant", "content": "7"}, History()
    strand = Strand(np.array([1, 2]), 1, "s", is_busy=False)
    history.answered("solver", None, [USER, called("c1"), output("c1"), USER, answer], strand)
    chat = [USER, called(None), output(None), USER, answer, USER]
    assert history.find("solver", None, chat) is not None


def test_arguments_nested_too_deeply_are_compared_as_text() -> None:
    deep = "[" * 100_000
    history = known(called("c1", arguments=deep))
    assert history.find("solver", None, [USER, called("n1", arguments=deep), output("n1")]) is not None
    assert history.find("solver", None, [USER, called("n1", arguments=deep + " "), output("n1")]) is None


def test_of_equal_chats_the_one_of_the_same_name_goes_on() -> None:
    history, asked = History(), [USER, {"role": "assistant", "content": "7"}]
    strands = [Strand(np.array([1, 2]), 1, uid, is_busy=False, call=call) for call, uid in enumerate("ab")]
    for strand in strands:
        history.answered("solver", None, asked, strand)
    for strand in strands:
        found = history.find("solver", None, [*asked, USER], lambda each, strand=strand: each is strand)
        assert found is not None and found.behind is strand


@pytest.mark.parametrize("kind", ["blocks", "text"])
def test_claude_codes_attribution_is_left_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def system(number: int) -> Any:
        texts = [f"x-anthropic-billing-header: cc_version=2.1; cch={number};", "You solve."]
        return "\n".join(texts) if kind == "text" else [{"type": "text", "text": text} for text in texts]

    monkeypatch.setattr("marsrl.rollout.gateway.messages_api.read_chat", lambda body, agents: body["messages"])
    for number in range(2):
        body = {"model": "solver", "max_tokens": 9, "messages": [USER], "system": system(number)}
        assert read_messages(body, {}) == [{"role": "system", "content": "You solve."}, USER]
