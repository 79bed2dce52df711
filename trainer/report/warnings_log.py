"""warnings.jsonl: what a run warned of, a line each, with the step that it was given in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from marsrl.trainer.runs.directory import names_file


@dataclass(frozen=True, slots=True)
class Warned:
    """One line. step: None where the line is no warning, and text says so."""

    step: int | None
    text: str


def append_warning(path: Path, step: int, text: str) -> None:
    """Write one more, which a reader sees whole or not at all."""
    with names_file(path), open(path, "ab") as file:
        file.write(json.dumps({"step": step, "text": text}).encode("ascii") + b"\n")


def read_warnings(path: Path) -> list[Warned]:
    """Every whole line; none where there is no file. A torn last line (it is being written) is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [_read(line, path) for line in lines]


def _read(line: bytes, path: Path) -> Warned:
    try:
        said = json.loads(line)
        return Warned(int(said["step"]), str(said["text"]))
    except (ValueError, KeyError, TypeError):
        return Warned(None, f"{path.name} has a line that is no warning: {line[:80]!r}")
