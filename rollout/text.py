"""One line of an error for use in a message: at most 300 characters; the error's class if it has no text."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    return _lines(error)[0][:300]


def last_line(error: BaseException) -> str:
    """The last line of an error: Ray puts the cause there."""
    return _lines(error)[-1][:300]


def in_one_line(error: BaseException) -> str:
    """The whole text, also beyond 300 characters."""
    return " ".join(str(error).split())


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
