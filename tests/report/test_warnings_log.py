"""Warnings of a run, written and read."""

from __future__ import annotations

from pathlib import Path

from marsrl.trainer.report.warnings_log import Warned, append_warning, read_warnings


def test_what_was_warned_of_is_read_again_and_a_line_that_is_none_says_so(tmp_path: Path) -> None:
    path = tmp_path / "warnings.jsonl"
    assert read_warnings(path) == []
    append_warning(path, 3, "slow \ud800\n\x1b[2J")
    with path.open("ab") as file:
        file.write(b'{"step": 4}\n')
    append_warning(path, 5, "slower")
    with path.open("ab") as file:
        file.write(b'{"step": 6, "text": "being writt')
    first, damaged, last = read_warnings(path)
    assert (first, last) == (Warned(3, "slow \ud800\n\x1b[2J"), Warned(5, "slower"))
    assert damaged == Warned(None, "warnings.jsonl has a line that is no warning: b'{\"step\": 4}'")
