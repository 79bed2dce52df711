from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from marsrl.trainer.report.samples_log import write_samples
from marsrl.trainer.report.token_log import write_tokens
from marsrl.trainer.runs.directory import RunDirectory, step_files, write_json
from marsrl.trainer.runs.lock import RunLock


def test_two_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    names = [RunDirectory.create(tmp_path, None, "cpu_default", now=now).path.name for _ in range(3)]
    assert names == [f"cpu_default-20260102-030405{end}" for end in ("", "-2", "-3")]


BEGUN: dict[str, Callable[[RunDirectory], object]] = {
    "a step": lambda run: run.metrics.write_text('{"step": 1}\n'),
    "a checkpoint": lambda run: run.checkpoints.mkdir(),
    "samples": lambda run: run.samples.mkdir(),
    "an evaluation": lambda run: write_json(run.evaluation_before, {}),
}


@pytest.mark.parametrize("sign", BEGUN)
def test_only_begun_runs_keep_their_name_and_first_settings(sign: str, tmp_path: Path) -> None:
    failed = RunDirectory.create(tmp_path, "a", "p")
    failed.write_config({"x": 0})
    RunLock(failed).release()
    failed.metrics.touch()  # opened, but nothing logged
    run = RunDirectory.create(tmp_path, "a", "p")
    assert run.write_config({"x": 1}).read_text() == "x: 1\n"
    BEGUN[sign](run)
    with pytest.raises(ValueError, match="exists and is never overwritten.*run.resume=auto"):
        RunDirectory.create(tmp_path, "a", "p")
    again = RunDirectory.create(tmp_path, "a", "p", "auto")
    assert again.existed and again.write_config({"x": 1}) == again.config
    assert again.write_config({"x": 2}).name == "config.resumed_1.yaml"
    assert again.config.read_text() == "x: 1\n"


def test_a_run_without_file_locks_continues_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    told: list[str] = []
    warning = RunLock.of_out(tmp_path / "out", told.append).warning
    assert warning is not None and "no file locks (Operation not supported)" in warning and told == [warning]


NO_NAMES = ("../a", "a/b", "", ".", ".hidden", "a\n")


@pytest.mark.parametrize(
    ("name", "resume", "reason"),
    [
        ("home", "auto", "has no config.yaml, so it is not a run directory; set another run.name"),
        ("home", "off", "exists and is never overwritten"),
        ("theirs", "off", "exists and is never overwritten"),  # its config.yaml may belong to another run
        (None, "auto", "run.name is not set"),
        ("a" * 300, "off", "File name too long"),
        *((name, "off", "plain folder name") for name in NO_NAMES),
    ],
)
def test_a_name_that_cannot_be_this_run_s_is_refused(
    name: str | None, resume: Any, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    RunDirectory.create(tmp_path, "theirs", "p").write_config({"x": 1})
    with pytest.raises(ValueError, match=reason):
        RunDirectory.create(tmp_path, name, "p", resume)


def test_an_unusable_run_folder_is_named_before_and_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for make in (RunDirectory.create, RunDirectory.find):
        run_dir = tmp_path / "file" / "runs"
        with pytest.raises(ValueError, match=f"run.dir={run_dir}: {tmp_path / 'file'} is a file; name a folder"):
            make(run_dir, "a", "off" if make == RunDirectory.find else "p")  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"run.dir=/b+: .*[Ff]ile name too long; set run.dir to a folder"):
            make("/" + "b" * 300, "a", "off" if make == RunDirectory.find else "p")  # type: ignore[operator]
    with (
        nobody() as folder,
        pytest.raises(ValueError, match=f"run.dir={folder}/runs: {folder}/marsrl-.*: Permission denied"),
    ):
        RunDirectory.find(folder / "runs", "a")


@contextlib.contextmanager
def nobody() -> Iterator[Path]:
    """Yield a folder that this process can read but not write; inside the block root becomes another user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)


def test_steps_that_are_played_again_are_forgotten_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (0, 4, 8, 12):
        run.evaluation(step).mkdir(parents=True)
        write_samples(run, step, [])
        write_tokens(run, step, [])
    (run.evaluations / "step_x").mkdir()
    (run.tokens / ".step_9.msgpack.zst.77.tmp").touch()  # killed while writing
    run.forget_after(8)
    assert sorted(path.name for path in run.evaluations.iterdir()) == ["step_0", "step_4", "step_8", "step_x"]
    assert [*step_files(run.samples)] == [*step_files(run.tokens)] == [0, 4, 8]
    assert len([*run.tokens.iterdir()]) == 3
