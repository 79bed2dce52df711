"""The built-in questions' tokenizers: the words of linked facts, and what a team reads and writes around them.

facts: of a search team. calls: of a team that calls tools, with calculations; a token is a piece of a call's JSON, which may have
spaces between its pieces.
"""

from __future__ import annotations

from marsrl.rollout.agents.prompts import NEXT_TURN, NOTHING_READ, NOTHING_SEARCHED
from marsrl.rollout.tasks import calculations
from marsrl.rollout.tasks.linked_facts import WORDS
from marsrl.rollout.tasks.word_tokenizer import WordTokenizer

_TITLE = ("Doc", *"123()", "Title:")


def _tags(*names: str) -> tuple[str, ...]:
    return tuple(f"<{slash}{tag}>" for tag in names for slash in ("", "/"))


def _tokenizer(*words: str) -> WordTokenizer:
    return WordTokenizer(words, gaps=r"\s+", apart="</?[a-z_]+>|[()]")


FACTS_TOKENIZER = _tokenizer(
    *_tags("verify", "search", "answer", "information"),
    *("yes", "no", "verify", "search", "answer", *NOTHING_SEARCHED.split(), *_TITLE, *WORDS),
)

SEARCH_CALL = ('{"tool":"search","arguments":{"query":"', '"},"purpose":"', '"}')
"""Before a query, before its purpose, and behind it."""
PYTHON_CALL = ('{"tool":"python","arguments":{"code":"print', '"}}')
"""Before what is printed, in its parentheses, and behind it."""

PURPOSE = "What is looked for:"
"""Before the purpose of a call in System 1's prompt (prompt_sets/facts.yaml)."""

CALLS_TOKENIZER = _tokenizer(
    *_tags("tool_call", "tool_response", "answer"),
    *(*SEARCH_CALL, *PYTHON_CALL, "read", "error:", *PURPOSE.split(), *NEXT_TURN.split()),
    *(*NOTHING_READ.strip("()").split(), *_TITLE, *WORDS, *calculations.WORDS),
)
