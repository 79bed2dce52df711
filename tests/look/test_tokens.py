"""Tokens in the viewer while a run writes them, and after a kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hostile_run import write_made_up_tokens
from made_up_run import make_sample

from marsrl.trainer.commands.look.tokens import tokens_of_sample
from marsrl.trainer.report.token_log import read_tokens, token_file, token_files
from marsrl.trainer.runs.directory import RunDirectory

SAMPLE = make_sample("p0/solver:0")


def write(run: RunDirectory, step: int) -> None:
    write_made_up_tokens(run, step, {1: SAMPLE}, {SAMPLE.uid})


def kill_in_the_write(run: RunDirectory, step: int) -> None:
    """All of the file is written, and none of it is in its place yet."""

    def killed() -> None:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write(run, step)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_kill_in_the_write_leaves_what_there_was_and_hides_nothing_after(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    write(run, 1)
    before = token_file(run, 1).read_bytes()
    kill_in_the_write(run, 1)  # a step that is played again
    kill_in_the_write(run, 2)
    assert list(token_files(run)) == [1] and token_file(run, 1).read_bytes() == before
    told = tokens_of_sample(run, 2, SAMPLE.uid)
    assert told["kept"] is None and told["near"]["step"] == 1
    write(run, 2)  # the next life plays it again
    write(run, 3)
    assert list(token_files(run)) == [read_tokens(file).step for file in token_files(run).values()] == [1, 2, 3]
    assert all(tokens_of_sample(run, step, SAMPLE.uid)["kept"]["ids"] == [0, 1, 2, 3] for step in (1, 2, 3))


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
