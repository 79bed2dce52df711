"""Description of why a call begins a new sample although its chat contains an earlier sample's answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from marsrl.rollout.gateway.history import ChatMessage, content_of

BRANCH = "another call continues the same answer"
THOUGHTS = "the chat template leaves out thoughts of earlier answers"
OTHER = "the tools, the template options or the ids of calls change"

_WHAT = {"system": "the system prompt", "assistant": "an answer", "tool": "a tool's output", "user": "a user's message"}
_MOST_WORD = 20  # characters shown before and after a change


def first_change(before: Sequence[ChatMessage], now: Sequence[ChatMessage]) -> str:
    """Describe the first difference between an answered chat and a later one, in one line of at most about 150 characters.

    Returns "" if their messages do not differ.
    """
    for place, (old, new) in enumerate(zip(before, now, strict=False)):
        what = _WHAT.get(old["role"], "a message")
        if _form(old) != _form(new):
            rest = [_form(message) for message in before[place + 1 :]]
            if _form(new) in rest:
                more = rest.index(_form(new))
                others = f" and {more} more message{'s' * (more > 1)}" if more else ""
                return f"{what}{others} {'are' if more else 'is'} left out: {old['content'][:_MOST_WORD]!r}"
            if old["role"] != new["role"]:
                return (
                    f"{_WHAT.get(new['role'], 'a message')} takes the place of {what}: {new['content'][:_MOST_WORD]!r}"
                )
            if old["content"] != new["content"]:
                return f"{what} changes at {_change(old['content'], new['content'])}"
            return f"{what} has other calls"
        thoughts = [str(message.get("reasoning") or "") for message in (old, new)]
        if new.get("reasoning") is not None and thoughts[0] != thoughts[1]:
            return f"the thought of {what} changes at {_change(*thoughts)}"
    return "" if len(now) > len(before) else "an earlier chat is sent again"


def kind_of(change: str) -> str:
    """Return a change's description without position and quoted words, so that equal kinds are counted together."""
    return re.split(" at character | after token |: ", change)[0]


def _form(message: ChatMessage) -> tuple[str, str, Sequence[Any]]:
    return message["role"], message["content"], [content_of(call) for call in message.get("tool_calls") or ()]


def _change(old: str, new: str) -> str:
    """Describe the first difference of two texts: `character 331: '10:01', '10:02'`, counted from 1."""
    length = min(len(old), len(new))
    low, high = 0, length  # bounds on the length of the common prefix
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if old[low:middle] == new[low:middle] else (low, middle - 1)
    words = _word(old, low), _word(new, low)
    if words[0] == words[1]:  # the words are equal, so the change begins after them
        words = old[low : low + _MOST_WORD], new[low : low + _MOST_WORD]
    return f"character {low + 1}: {words[0]!r}, {words[1]!r}"


def _word(text: str, position: int) -> str:
    """Return the word around a position, without punctuation at its ends; a long word is cut."""
    before = re.split(r"\s", text[max(0, position - _MOST_WORD) : position])[-1]
    after = re.split(r"\s", text[position : position + _MOST_WORD])[0]
    return (before + after).strip(".,;")
