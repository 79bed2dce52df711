"""The built-in questions' tokenizers: the words of linked facts, and what a team reads and writes around them.

facts: of a search team. calls: of a team that calls tools, with calculations; a token is a piece of a call's JSON, which may have
spaces between its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from marsrl.rollout.agents.prompts import NEXT_TURN, NOTHING_READ, NOTHING_SEARCHED, stated_purpose
from marsrl.rollout.tasks import calculations
from marsrl.rollout.tasks.linked_facts import WORDS
from marsrl.rollout.tasks.word_tokenizer import CONTROL, padded, write_word_tokenizer

_TITLE = ("Doc", *"123()", "Title:")
_APART = "</?[a-z_]+>|[()]"


def _tags(*names: str) -> tuple[str, ...]:
    return tuple(f"<{slash}{tag}>" for tag in names for slash in ("", "/"))


def _vocabulary(*words: str) -> tuple[str, ...]:
    return padded(tuple(dict.fromkeys((*CONTROL, *words))))


VOCABULARY = _vocabulary(
    *_tags("verify", "search", "answer", "information"),
    *("yes", "no", "verify", "search", "answer", *NOTHING_SEARCHED.split(), *_TITLE, *WORDS),
)

SEARCH_CALL = ('{"tool":"search","arguments":{"query":"', '"},"purpose":"', '"}')
"""Before a query, before its purpose, and behind it."""
PYTHON_CALL = ('{"tool":"python","arguments":{"code":"print', '"}}')
"""Before what is printed, in its parentheses, and behind it."""

CALLS_VOCABULARY = _vocabulary(
    *_tags("tool_call", "tool_response", "answer"),
    *(*SEARCH_CALL, *PYTHON_CALL, "read", "error:", *stated_purpose("").split(), *NEXT_TURN.split()),
    *(*NOTHING_READ.strip("()").split(), *_TITLE, *WORDS, *calculations.WORDS),
)


def write_facts_tokenizer(directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into an existing directory."""
    _write(directory, VOCABULARY)


def write_calls_tokenizer(directory: str | Path) -> None:
    """The same of the other vocabulary."""
    _write(directory, CALLS_VOCABULARY)


def _write(directory: str | Path, vocabulary: Sequence[str]) -> None:
    write_word_tokenizer(directory, vocabulary, gaps=r"\s+", apart=_APART)
