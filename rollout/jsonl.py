"""Readers of untrusted files of JSON objects: one per line, or all in one array."""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path


class BadLine(ValueError):
    """Raised for an invalid row. The message is only the reason, without file or line."""


def read_rows(file: Path) -> Iterator[tuple[int, Mapping[str, object] | BadLine]]:
    """Yield (number from 1, row or BadLine); blank lines are skipped.

    number: number of the line, or of the object if the file is one array or one multi-line object.

    Raises ValueError if the array is not valid JSON, so that none of its rows can be read.
    """
    if (rows := _of_document(file)) is not None:
        for number, row in enumerate(rows, start=1):
            yield number, _object(row)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _row(line)


def _of_document(file: Path) -> list[object] | None:
    """Return the rows of a file that is one JSON document; None if each line is a document."""
    with file.open("rb") as opened:
        is_array = opened.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array and file.suffix != ".json":
        return None
    try:
        document = json.loads(file.read_bytes().decode("utf-8-sig"), object_pairs_hook=_with_unique_keys)
    except UnicodeDecodeError:
        return None
    except json.JSONDecodeError as error:
        is_line = error.msg == "Extra data" and file.suffix != ".json"  # the file may have one document per line
        if not is_array or is_line:
            return None
        is_cut = error.pos >= len(error.doc.rstrip())
        what = "the file is cut off" if is_cut else error.msg
        raise ValueError(
            f"{file}: the array is not JSON: {what} at line {error.lineno}, column {error.colno}; expected [{{...}}, ...], or "
            "one object per line without brackets"
        ) from None
    except (ValueError, RecursionError) as error:
        if not is_array:
            return None
        raise ValueError(f"{file}: the array is not readable as JSON: {error}") from None
    return document if isinstance(document, list) else [document]


def _row(line: bytes) -> Mapping[str, object] | BadLine:
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_with_unique_keys)
    except UnicodeDecodeError as error:
        return BadLine(f"not UTF-8 at byte {error.start}")
    except BadLine as reason:
        return reason
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip()):
            return BadLine(
                f"not JSON: cut off at column {len(error.doc.rstrip()) + 1}, in the middle of an object; expected a complete "
                "object on each line"
            )
        return BadLine(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        # For instance, a number has thousands of digits, or thousands of brackets are nested.
        return BadLine(f"not readable as JSON: {error}")
    return _object(row)


def _with_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; raise BadLine if it has a key twice, because json would silently keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise BadLine(f"an object has the key {key!r} twice; remove one")
    return fields


def _object(row: object) -> Mapping[str, object] | BadLine:
    return row if isinstance(row, dict) else BadLine(f"expected a JSON object, found {type(row).__name__}")


def well_formed(text: str, what: str) -> str:
    """Return the text if UTF-8 can encode it. JSON can contain lone surrogates, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadLine(
            f"{what} has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start + 1}"
        ) from None
    return text
