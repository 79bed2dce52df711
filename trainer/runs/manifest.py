"""Manifest of a checkpoint, manifest.json: size and CRC-32 of every file, and a checksum of itself.

CRC-32 detects all burst errors of up to 32 bits and all but one in 2^32 other errors; it does not protect against attackers.
zlib computes it at 1.5 GB/s on one core and releases the GIL.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from marsrl.trainer.runs.directory import write_atomically

NAME = "manifest.json"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileSum:
    num_bytes: int
    crc32: int


class DamagedError(RuntimeError):
    """Raised if the manifest itself is missing or damaged; the message names it."""


def file_sum(path: Path) -> FileSum:
    """Return size and CRC-32 of a file on disk."""
    crc, num_bytes = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            num_bytes += len(block)
    return FileSum(num_bytes, crc)


def write_manifest(folder: Path, known: Mapping[str, FileSum]) -> None:
    """Write the manifest of all files under `folder`.

    known: checksums computed while writing; other files are read now.
    """
    sums = {name: known.get(name) or file_sum(folder / name) for name in _names(folder)}
    missing = sorted(known.keys() - sums.keys())
    if missing:
        raise OSError(f"{folder / missing[0]} was written but no longer exists")
    write_atomically(folder / NAME, _render(sums))


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Return checksums by file name relative to `folder`, sorted by name.

    Raises DamagedError if the manifest is missing, or differs from what was written.
    """
    path = folder / NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing: the checkpoint is incomplete") from None
    try:
        files = json.loads(content)["files"]
        sums = {str(name): FileSum(int(size), int(crc, 16)) for name, (size, crc) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {error!r}") from error
    if _render(sums) != content:
        raise DamagedError(f"{path} is damaged: its checksum does not match its content")
    return sums


def damage(folder: Path, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return a line per damaged file under `folder`, with found and expected values; [] if all are intact.

    Ranks share the reading: rank `part` of `num_parts` reads its share of the files; part 0 also looks for unknown files.
    """
    try:
        sums = read_manifest(folder)
    except DamagedError as error:
        return [str(error)]
    differing = [line for name in list(sums)[part::num_parts] if (line := _difference(folder / name, sums[name]))]
    strangers = sorted(_names(folder) - sums.keys()) if part == 0 else []
    return differing + [f"{folder / name} is not in {NAME}; remove it if it is yours" for name in strangers]


def missing_or_cut(folder: Path) -> str | None:
    """Describe the first file under `folder` that is missing or has another size; None: no such file."""
    try:
        sums = read_manifest(folder)
    except DamagedError as error:
        return str(error)
    return next((line for name, expected in sums.items() if (line := _other_size(folder / name, expected))), None)


def _other_size(path: Path, expected: FileSum) -> str | None:
    if not path.is_file():
        return f"{path} is missing; expected {expected.num_bytes} bytes"
    size = path.stat().st_size
    return None if size == expected.num_bytes else f"{path} has {size} bytes, expected {expected.num_bytes}"


def _difference(path: Path, expected: FileSum) -> str | None:
    if problem := _other_size(path, expected):
        return problem
    actual = file_sum(path)
    return None if actual == expected else f"{path} has checksum {actual.crc32:08x}, expected {expected.crc32:08x}"


def _names(folder: Path) -> set[str]:
    """Return all files under the folder except the manifest, as relative posix paths."""
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix() for path in files} - {NAME}


def _render(sums: Mapping[str, FileSum]) -> bytes:
    lines = [f'  {json.dumps(name)}: [{sums[name].num_bytes}, "{sums[name].crc32:08x}"]' for name in sorted(sums)]
    body = ",\n".join(lines)
    return f'{{"crc32": "{zlib.crc32(body.encode()):08x}", "files": {{\n{body}\n}}}}\n'.encode("ascii")
