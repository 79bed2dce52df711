"""Log of verified publishes of weights, one per line of publishes.jsonl; `marsrl audit` compares it with the samples."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from marsrl.trainer.runs.directory import names_file, write_atomically


@dataclass(frozen=True, slots=True)
class Publish:
    """One version of a policy on its engines, once all checks have passed.

    step: step that ended with this publish; for the first publish of a process, 0 or the step resumed from.
    digest: digest of the checksums of all sent tensors, which every engine holds. The same version has the same digest on engines
        with the same number of shards.
    engines: number of engines that were checked.
    shards: number of parts into which an engine divides its weights.
    median, noise: results of the comparison of log-probs, nats (weights/comparison.py); None if no comparison was due.
    """

    step: int
    policy: str
    version: int
    digest: str
    engines: int
    median: float | None
    noise: float | None
    num_bytes: int
    seconds: float
    shards: int = 1


def append_publish(path: Path, publish: Publish) -> None:
    """Append a line, which readers see completely or not at all."""
    with names_file(path), open(path, "ab") as file:
        file.write(msgspec.json.encode(publish) + b"\n")
        file.flush()
        os.fsync(file.fileno())  # The audit compares it with metrics.jsonl, which is flushed too.


def read_publishes(path: Path) -> list[Publish]:
    """Return the publishes of all complete lines, [] without a file; skip a torn last line. ValueError names a damaged line."""
    if not path.exists():
        return []
    publishes = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            publishes.append(msgspec.json.decode(line, type=Publish))
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not a line of a publish ({error}); remove it or restore the file"
            ) from error
    return publishes


def forget_publishes(path: Path, step: int) -> None:
    """Remove lines of later steps, which will be repeated, and a torn line."""
    kept = [publish for publish in read_publishes(path) if publish.step <= step]
    if path.exists():
        write_atomically(path, b"".join(msgspec.json.encode(publish) + b"\n" for publish in kept))
