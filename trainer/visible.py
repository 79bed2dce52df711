"""Display of untrusted text."""

from __future__ import annotations

import logging
from typing import Any

_RANGES = ((0x7F, 0x9F), (0x61C, 0x61C), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069), (0xD800, 0xDFFF))
_NAMED = (*(c for first, last in _RANGES for c in range(first, last + 1)), 0xFEFF, 0xFFFE, 0xFFFF)
_VISIBLE = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_VISIBLE |= {c: f"⟨U+{c:04X}⟩" for c in _NAMED}


class Key(str):
    """Text that pages use as a key and never show (an agent's name, a problem); `shown` leaves it unchanged."""


def visible(text: str) -> str:
    """Return the text without hidden characters: control characters become symbols, other hidden characters are named."""
    return text.translate(_VISIBLE)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_visibly() -> None:
    """Replace hidden characters in log messages, because errors of programs, tools and teams may quote models' text."""
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(_Visible())


def shown(value: Any) -> Any:
    """Return a JSON value with all texts made visible, except Keys."""
    if isinstance(value, str):
        return value if isinstance(value, Key) else visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return value


def shorten(text: str, most: int) -> str:
    """Return the text, or only its beginning and end if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n\n[... {len(text) - 2 * half:,} characters left out ...]\n\n{text[-half:]}"
