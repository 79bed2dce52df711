"""A run on the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from marsrl.trainer.commands.cli import main


def test_a_hostile_run_steers_no_terminal(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", *map(str, runs), "--text"]) == 0
    shown = capsys.readouterr().out
    assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert "␛" in shown and "⟨U+202E⟩" in shown.replace("\n", "")
    assert "last step logged: 5" in shown and "not finished, last step logged: 2" in shown
    assert "says wrong" in shown and "is no file of samples" in shown and "reward/solver/mean" in shown


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(tmp_path), "--text"]) == 2
    assert "is not a run directory" in capsys.readouterr().err
