"""Store of model answers, appended to a file as they arrive, so that no request is repeated.

An answer's key is a hash of everything it depends on, so it stays valid if other settings or the order of rows change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from marsrl.trainer.runs.directory import names_file

Answer = TypeVar("Answer")


def key_of(**parts: Any) -> str:
    """Return the key of an answer, a hash of everything that the answer depends on: 32 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


class Answers(dict[str, Answer]):
    """Answers by key, in one file.

    path: the file; None keeps the answers only in memory.
    read: parses an answer; returns None or raises if the answer is invalid.
    """

    def __init__(self, path: Path | None, read: Callable[[Any], Answer | None]) -> None:
        super().__init__()
        self._read = read
        self._file: BinaryIO | None = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._file = open(path, "r+b")  # noqa: SIM115 - close() does
        end = self._read_all(self._file)
        with names_file(path):
            self._file.truncate(end)
            self._file.seek(end)

    def add(self, key: str, answer: Mapping[str, Any], *, is_whole: bool = True) -> None:
        """Add an answer. After this returns, only a crash of the machine can lose the answer.

        is_whole: False if a part of the answer failed: it is then not written, so the next process requests it again.
        """
        line = json.dumps({"key": key, "answer": answer}, allow_nan=False).encode("ascii") + b"\n"
        if self._file is not None and is_whole:
            with names_file(Path(self._file.name)):
                self._file.write(line)
                self._file.flush()
        self._hold(line)

    def close(self) -> None:
        """Flush to disk and close; may be called twice."""
        if self._file is not None and not self._file.closed:
            with names_file(Path(self._file.name)):
                os.fsync(self._file.fileno())
            self._file.close()

    @classmethod
    def read(cls, path: Path, read: Callable[[Any], Answer | None]) -> list[Answer]:
        """Read a file that another process may be writing, without changing it."""
        answers = cls(None, read)
        with path.open("rb") as file:
            answers._read_all(file)
        return list(answers.values())

    def _read_all(self, file: BinaryIO) -> int:
        """Read all answers; return the number of bytes in complete lines."""
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break  # The writer died in this line, or is still writing it.
            end += len(line)
            self._hold(line)
        return end

    def _hold(self, line: bytes) -> None:
        try:
            line_value = json.loads(line)
            answer = self._read(line_value["answer"])
            if answer is not None and isinstance(line_value["key"], str):
                self[line_value["key"]] = answer
        except (ValueError, KeyError, TypeError, RecursionError):
            return  # A damaged answer is requested again.
