"""warnings.jsonl: a run's warnings, a line each, with the step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from marsrl.trainer.runs.directory import names_file


@dataclass(frozen=True, slots=True)
class Warned:
    """One line. step: None if the line is invalid, which text says."""

    step: int | None
    text: str


def append_warning(path: Path, step: int, text: str) -> None:
    """Append a warning, which readers see completely or not at all."""
    with names_file(path), open(path, "ab") as file:
        file.write(json.dumps({"step": step, "text": text}).encode("ascii") + b"\n")


def read_warnings(path: Path) -> list[Warned]:
    """Every complete line; none without a file. A torn last line (being written) is skipped."""
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
