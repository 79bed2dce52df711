"""Rows of an untrusted jsonl file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path


class BadLine(ValueError):
    """An invalid row; the message is the reason alone."""


def read_rows(file: Path) -> Iterator[tuple[int, Mapping[str, object] | BadLine]]:
    """(line number from 1, row or the reason why it is invalid); blank lines are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _row(line)


def _row(line: bytes) -> Mapping[str, object] | BadLine:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip()):
            return BadLine(
                f"not JSON: it is cut off at column {len(error.doc.rstrip()) + 1}, in the middle of an object"
            )
        return BadLine(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        return BadLine(f"not readable as JSON: {error}")
    return row if isinstance(row, dict) else BadLine(f"expected a JSON object, found {type(row).__name__}")


def well_formed(text: str, what: str) -> str:
    """The text if UTF-8 can encode it: JSON can contain lone surrogates, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine(
            f"{what} has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
        ) from None
    return text
