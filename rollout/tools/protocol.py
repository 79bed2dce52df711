"""Protocol of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from marsrl.rollout.types import ToolFunction, ToolOutput

MOST_QUERIES = 8
"""Maximum searches, or pages, in one call."""

ReadPages = Callable[[Sequence[str], float], Sequence[ToolOutput]]
"""Reads pages in parallel: (addresses, seconds to wait) -> each page's main text, or the reason why it has none, in order."""

WAITED = 0.9
"""Share of a call's time limit in which its pages must arrive; the rest is for processing them."""

_MOST_SHOWN = 80  # characters of an argument in a message


class ToolError(Exception):
    """Raised for a failed call. The model sees the message."""


class Tool(Protocol):
    """Tool that agents call. Thread-safe; ToolPool bounds its time and output.

    is_deterministic: True if equal arguments give equal outputs during a run, so that outputs may be cached. A tool with its own
    metrics also has `take_counts() -> dict[str, float]`: its counts by name since the last call, zeros included. A user's tool
    lists its functions (`functions`); those of built-in tools are in SHIPPED.
    """

    is_deterministic: bool

    def run(self, arguments: Mapping[str, object]) -> str | Sequence[str]:
        """Return the output: a text, or a list of self-contained parts (pages, papers). Models see the text of a ToolError.

        arguments: any JSON object, as the model wrote it.
        """

    def close(self) -> None:
        """Release resources. Running calls may fail."""


def _of_texts(name: str, description: str, argument: str, item_description: str) -> ToolFunction:
    texts = {
        "type": "array",
        "items": {"type": "string"},
        "minItems": 1,
        "maxItems": MOST_QUERIES,
        "description": item_description,
    }
    return ToolFunction(name, description, {"type": "object", "properties": {argument: texts}, "required": [argument]})


SHIPPED: Mapping[str, ToolFunction] = {
    function.name: function
    for function in (
        _of_texts("search", "Finds pages by a search engine.", "queries", "what to search for"),
        _of_texts("scholar", "Finds papers, with year, citations and abstract.", "queries", "what to search for"),
        _of_texts("visit", "Reads pages of the web.", "urls", "addresses of the pages"),
        ToolFunction(
            "python",
            "Runs a Python program, without network and without memory of earlier calls, and shows what it prints.",
            {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        ),
    )
}
"""Functions of the built-in tools, as chat templates show them."""


def text_argument(arguments: Mapping[str, object], name: str) -> str:
    """Return the argument of a tool that takes a single text; ToolError describes any other input."""
    if list(arguments) != [name]:
        found = ", ".join(repr(key[:40]) for key in list(arguments)[:5]) or "none"
        raise ToolError(f"expected one argument, {name!r}, found {found}")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolError(f"{name!r} is {type(value).__name__}, expected text")
    return value


def text_arguments(arguments: Mapping[str, object], one: str, several: str) -> list[str]:
    """Return the distinct texts of {one: text} or {several: [texts]}; ToolError describes any other input."""
    if list(arguments) != [several]:
        return [text_argument(arguments, one)]
    texts = arguments[several]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ToolError(f"{several!r} is {repr(texts)[:_MOST_SHOWN]}, expected a list of texts")
    if len(texts) > MOST_QUERIES:
        raise ToolError(f"{several!r} has {len(texts):,} texts, expected at most {MOST_QUERIES}")
    return list(dict.fromkeys(texts))


def query_arguments(arguments: Mapping[str, object]) -> list[str]:
    """Return the distinct queries of {"query": text} or {"queries": [texts]}; ToolError describes any other input."""
    queries = text_arguments(arguments, "query", "queries")
    for query in queries:
        if not query.strip():
            raise ToolError("the query has no words" if len(queries) == 1 else "one of the queries has no words")
    return queries
