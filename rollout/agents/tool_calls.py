"""Calls of tools in the form of chat templates (Hermes, Qwen): one of several in a turn is

    <tool_call>
    {"name": "convert", "arguments": {"value": 3, "unit": "km"}}
    </tool_call>

and the outputs of all are the next messages, of role `tool`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from marsrl.rollout.agents.parsers import all_tagged
from marsrl.rollout.agents.prompts import without_tags
from marsrl.rollout.agents.render import ChatRenderer
from marsrl.rollout.types import Message, Sample, ToolCall, ToolFunction

MOST_CALLS = 8
"""Calls of one turn that are executed; further ones are refused."""

_MOST_SHOWN = 100  # characters of a model's text quoted in a message


def read_calls(sample: Sample, functions: Mapping[str, ToolFunction]) -> list[ToolCall | str]:
    """The calls in the sample's current turn; an invalid call is replaced by its error text.

    functions: those that it can call, by name.
    """
    turn = f"{sample.uid}/{sample.turn}"
    return [_call(turn, index, text, functions) for index, text in enumerate(all_tagged("tool_call", sample.shown))]


def _call(turn: str, index: int, text: str, functions: Mapping[str, ToolFunction]) -> ToolCall | str:
    if index >= MOST_CALLS:
        return f"at most {MOST_CALLS} calls in a turn are made"
    try:
        said = json.loads(text)
        has_keys = isinstance(said, dict) and said.keys() == {"name", "arguments"}
        if not has_keys or not isinstance(said["arguments"], dict):
            return 'a call has to be {"name": ..., "arguments": {...}}'
        function = functions.get(str(said["name"]))
        if function is None:
            return f"there is no tool {str(said['name'])[:_MOST_SHOWN]!r}; there are: {', '.join(functions)}"
        tool, given = (function.server, said) if function.server else (function.name, said["arguments"])
        return ToolCall(f"{turn}/{tool}#{index}", tool, json.dumps(given, sort_keys=True))
    except (ValueError, RecursionError) as error:
        return f"the call is not JSON ({str(error)[:_MOST_SHOWN]})"


def tool_messages(outputs: Sequence[str], renderer: ChatRenderer, max_tokens: int) -> list[Message]:
    """The outputs of a turn's calls as messages, max_tokens in total; the longest are truncated to a common length.

    The template puts tags around an output; the same tags inside it lose their brackets.
    """
    texts = renderer.cut_longest(outputs, max_tokens)
    return [Message("tool", without_tags("tool_response", without_tags("tool_call", text))) for text in texts]
