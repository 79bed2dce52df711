"""Conversion of error texts and untrusted texts for messages and files. Imports little, since worker processes load it."""

from __future__ import annotations

from typing import Any


def first_line(error: BaseException) -> str:
    """Return the first line of an error, at most 300 characters; the name of its class if the error has no text."""
    return _lines(error)[0][:300]


def last_line(error: BaseException) -> str:
    """Return the last line of an error, where Ray puts the cause; otherwise like first_line."""
    return _lines(error)[-1][:300]


def in_one_line(error: BaseException) -> str:
    """Return the whole text of an error on one line, without a length limit."""
    return " ".join(str(error).split())


def without_surrogates(value: Any) -> Any:
    """Replace each lone surrogate of a str by "?"; values of other types are returned as they are.

    Web pages, programs and JSON can contain half of a surrogate pair, which UTF-8 cannot encode.
    """
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
