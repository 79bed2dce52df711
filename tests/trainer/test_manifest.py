"""The list of a checkpoint's files: what is in it, and what it notices."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from marsrl.trainer.runs.manifest import (
    FileSum,
    damage,
    file_sum,
    missing_or_cut,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files and their manifest."""
    for name, content in {"a": b"abc", "policies/main/b": b"", "c": b"xyz"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path, {})
    return tmp_path


def test_a_manifest_lists_size_and_checksum_of_every_file_and_checks_itself(folder: Path) -> None:
    sums = {"a": FileSum(3, 0x352441C2), "c": FileSum(3, zlib.crc32(b"xyz")), "policies/main/b": FileSum(0, 0)}
    assert read_manifest(folder) == sums and damage(folder) == []
    body = f'  "a": [3, "352441c2"],\n  "c": [3, "{zlib.crc32(b"xyz"):08x}"],\n  "policies/main/b": [0, "00000000"]'
    text = f'{{"crc32": "{zlib.crc32(body.encode()):08x}", "files": {{\n{body}\n}}}}\n'
    assert (folder / "manifest.json").read_text() == text
    write_manifest(folder, {})  # it does not list itself
    assert (folder / "manifest.json").read_text() == text
    content = b"a" * (1 << 22) + b"b" * (1 << 22) + b"c"  # more than one block
    (folder / "c").write_bytes(content)
    assert file_sum(folder / "c") == FileSum(len(content), zlib.crc32(content))


def test_a_damaged_file_is_named_with_what_was_found_and_expected(folder: Path) -> None:
    (folder / "a").write_bytes(b"abd")
    (folder / "c").write_bytes(b"xy")
    (folder / "policies/main/b").unlink()
    for i in range(9):
        (folder / f"mine{i}").touch()
    (folder / "d").mkdir()  # a folder is no file
    found = [
        f"{folder / 'a'} has checksum {zlib.crc32(b'abd'):08x}, expected 352441c2",
        f"{folder / 'c'} has 2 bytes, expected 3",
        f"{folder / 'policies/main/b'} is missing; expected 0 bytes",
        *(f"{folder / f'mine{i}'} is not in manifest.json; remove it if it is yours" for i in range(9)),
    ]
    assert damage(folder) == found
    # two ranks share the files; the first looks for strangers
    assert damage(folder, 0, 2) == [found[0], *found[2:]] and damage(folder, 1, 2) == [found[1]]
    (folder / "a").unlink()
    (folder / "a").mkdir()
    assert damage(folder, 0, 3)[0] == f"{folder / 'a'} is missing; expected 3 bytes"


def test_a_quick_look_names_the_first_file_that_is_missing_or_cut_and_reads_none(folder: Path) -> None:
    assert missing_or_cut(folder) is None
    (folder / "a").write_bytes(b"abd")  # as long as it was
    (folder / "mine").touch()
    assert missing_or_cut(folder) is None and len(damage(folder)) == 2
    (folder / "policies/main/b").unlink()
    assert missing_or_cut(folder) == f"{folder / 'policies/main/b'} is missing; expected 0 bytes"
    (folder / "c").write_bytes(b"xyz, and more")
    assert missing_or_cut(folder) == f"{folder / 'c'} has 13 bytes, expected 3"
    (folder / "manifest.json").unlink()
    said = f"{folder / 'manifest.json'} is missing: the checkpoint was not written to its end"
    assert missing_or_cut(folder) == said and damage(folder) == [said]
