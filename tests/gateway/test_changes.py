"""How the warning describes what a program changed in a chat that it sends again."""

from __future__ import annotations

from typing import Any

import pytest

from marsrl.rollout.gateway.changes import first_change, kind_of

SYSTEM = {"role": "system", "content": "You solve.  It is 10:01. Be short."}
USER = {"role": "user", "content": "3 + 4?"}
ANSWER = {"role": "assistant", "content": "7, as 3 and 4 are 7."}
OUTPUT = {"role": "tool", "content": "y" * 300}
MORE = {"role": "user", "content": "And 5?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}
BEFORE = [SYSTEM, USER, ANSWER, OUTPUT, CALL]


def with_(index: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**message, **(fields if i == index else {})} for i, message in enumerate([*BEFORE, MORE])]


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (
            with_(0, content=SYSTEM["content"].replace("01", "02")),
            "the system prompt changes at character 23: '10:01', '10:02'",
        ),
        (with_(0, content=SYSTEM["content"] + " Now."), "the system prompt changes at character 35: '', ' Now.'"),
        (with_(2, content="7"), "an answer changes at character 2: ', as 3 and 4 are 7.', ''"),
        (with_(3, content="(dropped)"), "a tool's output changes at character 1: 'yyyyyyyyyyyyyyyyyyyy', '(dropped)'"),
        (
            with_(4, tool_calls=[{"id": "b", "function": {"name": "f", "arguments": {"n": 1}}}]),
            "an answer has other calls",
        ),
        (with_(4, tool_calls=[{"id": "b", "function": {"name": "f", "arguments": ""}}]), ""),
        ([SYSTEM, ANSWER, OUTPUT, MORE], "a user's message is left out: '3 + 4?'"),
        ([SYSTEM, USER, CALL, MORE], "an answer and 1 more message are left out: '7, as 3 and 4 are 7.'"),
        ([SYSTEM, USER, CALL, CALL], "an answer and 1 more message are left out: '7, as 3 and 4 are 7.'"),
        ([SYSTEM, USER, MORE], "a user's message takes the place of an answer: 'And 5?'"),
        ([*BEFORE, MORE], ""),
        (BEFORE[:3], "an earlier chat is sent again"),
    ],
)
def test_the_first_change_is_named_with_its_place(now: list[dict[str, Any]], says: str) -> None:
    assert first_change(BEFORE, now) == says


def test_a_changed_thought_is_named() -> None:
    before = [USER, {**ANSWER, "reasoning": "I add them."}]
    now = [USER, {**ANSWER, "reasoning": "I added them."}, MORE]
    assert first_change(before, now) == "the thought of an answer changes at character 6: 'add', 'added'"
    assert first_change(before, [USER, ANSWER, MORE]) == ""  # thoughts were not sent back


def test_equal_changes_at_other_places_are_of_one_kind() -> None:
    kinds = {kind_of(f"the system prompt changes at character {n}: '10:0{n}', 'x: y'") for n in range(9)}
    assert kinds == {"the system prompt changes"}
    assert kind_of("a user's message is left out: 'It is'") == "a user's message is left out"
    assert kind_of("the prompt changes after token 17") == "the prompt changes"


def test_a_description_is_short_whatever_the_chat_holds() -> None:
    long = "\x1b[31m" + "\u2603" * 100_000
    said = first_change([{**USER, "content": long}], [{**USER, "content": long + "\n\n" + long}])
    assert len(said) < 300 and "\x1b" not in said
