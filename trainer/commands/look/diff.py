"""Difference between a text and its origin: by lines, then by words within changed lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

MOST_CHARS = 200_000  # of a text; comparing longer ones would take too long
_MOST_WORDS = 3000  # words of a changed passage that is compared word by word
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")

Part = tuple[str, str]
"""("=" in both, "-" only in the first, "+" only in the second; the text)."""


def differences(before: str, after: str) -> list[Part] | None:
    """Parts that without "+" are `before` and without "-" are `after`; None if the texts are too long."""
    if max(len(before), len(after)) > MOST_CHARS:
        return None
    parts: list[Part] = []
    for part in _lines(before, after):
        if part[1] and parts and parts[-1][0] == part[0]:
            parts[-1] = (part[0], parts[-1][1] + part[1])
        elif part[1]:
            parts.append(part)
    return parts


def _lines(before: str, after: str) -> Iterator[Part]:
    for old, new, is_same in _matched(_LINE.findall(before), _LINE.findall(after)):
        words = _PIECE.findall(old), _PIECE.findall(new)
        if is_same:
            yield "=", new
        elif max(map(len, words)) > _MOST_WORDS:
            yield from (("-", old), ("+", new))
        else:
            for some, others, is_equal in _matched(*words):
                yield from (("=", others),) if is_equal else (("-", some), ("+", others))


def _matched(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Passages of both in order, with True if they are equal."""
    matcher = SequenceMatcher(None, before, after)  # with autojunk: otherwise repeated lines take quadratic time
    for kind, a, b, c, d in matcher.get_opcodes():
        yield "".join(before[a:b]), "".join(after[c:d]), kind == "equal"
