"""One line of an error, for a sentence that says what failed: 300 characters at most, the error's class where it says nothing."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error."""
    return _lines(error)[0][:300]


def last_line(error: BaseException) -> str:
    """The last line of an error: Ray puts the cause there."""
    return _lines(error)[-1][:300]


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
