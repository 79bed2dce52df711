"""The built-in questions' tokenizer: the words of linked facts, and what a search team reads and writes around them."""

from __future__ import annotations

from pathlib import Path

from marsrl.rollout.agents.prompts import NOTHING_SEARCHED
from marsrl.rollout.tasks.linked_facts import WORDS
from marsrl.rollout.tasks.word_tokenizer import CONTROL, padded, write_word_tokenizer

_TAGS = tuple(f"<{slash}{tag}>" for tag in ("verify", "search", "answer", "information") for slash in ("", "/"))
_AROUND = ("yes", "no", "verify", "search", "answer", *NOTHING_SEARCHED.split(), "Doc", *"123()", "Title:")
VOCABULARY = padded(tuple(dict.fromkeys((*CONTROL, *_TAGS, *_AROUND, *WORDS))))


def write_facts_tokenizer(directory: str | Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into an existing directory."""
    write_word_tokenizer(directory, VOCABULARY, gaps=r"\s+", apart="</?[a-z]+>|[()]")
