"""What a tool is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ToolError(Exception):
    """A call that has no answer. The text is what the model reads: it says what was wrong with the call."""


class Tool(Protocol):
    """Something agents call, from several threads at once; ToolPool bounds its time and its output.

    is_deterministic: the same arguments have the same answer for as long as a run lasts, so that it may be kept.
    """

    name: str
    is_deterministic: bool

    def run(self, arguments: Mapping[str, object]) -> str:
        """The answer, as text. arguments: what the model wrote, any JSON object.

        Raises:
            ToolError: what the caller is to read instead of an answer.
        """

    def close(self) -> None:
        """Release what it holds. Calls that still run may fail then."""


def text_argument(arguments: Mapping[str, object], name: str) -> str:
    """The one argument of a tool that takes one text; ToolError says what else was found."""
    if list(arguments) != [name]:
        found = ", ".join(repr(key[:40]) for key in list(arguments)[:5]) or "none"
        raise ToolError(f"expected one argument, {name!r}, found {found}")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolError(f"{name!r} is {type(value).__name__}, expected text")
    return value
