"""Tokens in the viewer while a run writes them, and after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile_run import write_made_up_tokens
from made_up_run import make_sample

from marsrl.trainer.commands.look.api import tokens_of_sample
from marsrl.trainer.report.token_log import token_file
from marsrl.trainer.runs.directory import RunDirectory

SAMPLE = make_sample("p0/solver:0")


def write(run: RunDirectory, step: int) -> None:
    write_made_up_tokens(run, step, {1: SAMPLE}, {SAMPLE.uid})


def test_half_a_file_is_told_of_its_own_step_and_hides_no_other(tmp_path: Path) -> None:
    """No write leaves one; a copy of a run that was broken off does."""
    run = RunDirectory.create(tmp_path, "a", "p")
    write(run, 1)
    write(run, 3)
    half = token_file(run, 3)
    half.write_bytes(half.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step_3\.parquet is no token log"):
        tokens_of_sample(run, 3, SAMPLE.uid)
    for step in (2, 4):
        assert tokens_of_sample(run, step, SAMPLE.uid)["near"]["step"] == 1
    assert tokens_of_sample(run, 1, SAMPLE.uid)["kept"]["policy"] == "main"
    token_file(run, 1).unlink()
    assert tokens_of_sample(run, 4, SAMPLE.uid) == {"kept": None, "near": None}
