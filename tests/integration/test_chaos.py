"""The shortest form of tests/chaos.py: two faults on one run, with our own engine in a Ray actor (about a minute)."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from books import Loss, check_books
from commands import run_by
from documents import ROOT
from runner import Runner

from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.manifest import write_manifest

pytestmark = pytest.mark.slow


def without_a_row(run: RunDirectory, last: Path) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:1] + lines[2:]))


def with_a_row_twice(run: RunDirectory, last: Path) -> None:
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:2] + lines[1:]))


def with_samples_twice(run: RunDirectory, last: Path) -> None:
    shutil.copy(run.samples / "step_1.parquet", run.samples / "step_2.parquet")


def without_samples(run: RunDirectory, last: Path) -> None:
    (run.samples / "step_2.parquet").unlink()


def with_a_byte_more(run: RunDirectory, last: Path) -> None:
    with open(last / "rollout.msgpack", "ab") as file:
        file.write(b"\0")


def without_an_instance(run: RunDirectory, last: Path) -> None:
    file = last / "rollout.msgpack"
    state = decode(RolloutState, file.read_bytes())
    state.stages.num_instances += 1
    file.write_bytes(encode(state))
    write_manifest(last, {})


LOSSES: dict[Callable[[RunDirectory, Path], None], str] = {
    without_a_row: r"has the steps \[1, 3, ",
    with_a_row_twice: r"has the steps \[1, 2, 2, ",
    with_samples_twice: "trained twice: ",
    without_samples: "the samples of step 2 are missing",
    with_a_byte_more: "rollout.msgpack",
    without_an_instance: "instances lost: ",
}


def test_two_faults_cost_nothing(tmp_path: Path, runner: Runner) -> None:
    """A killed engine, which the run survives, and Ray's head, from which it is resumed; then it comes to its end.

    What that run leaves is then damaged in every way that is looked for.
    """
    (command,) = run_by("test_two_faults_cost_nothing")
    short = ["--faults", "2", "--seed", "13", "--kinds", "kill-engine", "kill-gcs", "--engine", "local", "--keep"]
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *short],
        cwd=ROOT,
        env=runner.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "kill-engine after step " in done.stdout and "trains on, 1 engine(s) replaced" in done.stdout
    assert re.search(r"Ray is gone: its gcs_server .* run.resume=auto", done.stdout)
    assert "2 faults in 1 runs, seed 13: 1 kill-engine, 1 kill-gcs; 0 with a loss" in done.stdout
    kept = Path(done.stdout.rpartition("runs and logs are in ")[2].strip())
    check_books(RunDirectory(kept / "runs" / "run1"), 4)
    for lose, says in LOSSES.items():
        run = RunDirectory(tmp_path / lose.__name__)
        shutil.copytree(kept / "runs" / "run1", run.path)
        latest = run.latest_checkpoint()
        assert latest is not None
        lose(run, latest.path)
        with pytest.raises(Loss, match=says):
            check_books(run, 4)
    shutil.rmtree(kept)
