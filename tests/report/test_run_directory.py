from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from marsrl.trainer.run_directory import RunDirectory, write_json


def test_two_runs_of_the_same_second_do_not_share_a_directory(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    names = [RunDirectory.create(tmp_path, None, "cpu_default", now=now).path.name for _ in range(3)]
    assert names == [f"cpu_default-20260102-030405{end}" for end in ("", "-2", "-3")]


def test_a_named_run_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    run.write_config({"x": 1})
    with pytest.raises(ValueError, match="run.resume=auto"):
        RunDirectory.create(tmp_path, "a", "p")
    again = RunDirectory.create(tmp_path, "a", "p", "auto")
    assert again.existed and again.config.read_text() == "x: 1\n"


def test_resuming_in_a_foreign_folder_or_without_a_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="no run directory"):
        RunDirectory.create(tmp_path, "home", "p", "auto")
    with pytest.raises(ValueError, match="run.name is not set"):
        RunDirectory.create(tmp_path, None, "p", "auto")


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".", ".hidden", "a\n"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain folder name"):
        RunDirectory.create(tmp_path / "runs", name, "p")


def test_a_resumed_run_keeps_its_first_settings_beside_the_new_ones(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    assert run.write_config({"steps": 1}) == run.write_config({"steps": 1}) == run.config
    assert run.write_config({"steps": 2}).name == "config.resumed_1.yaml"
    assert run.config.read_text() == "steps: 1\n"


def test_the_latest_checkpoint_is_the_one_declared_whole(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "a", "p")
    assert run.latest_checkpoint() is None
    with pytest.raises(RuntimeError, match="not there"):
        run.mark_latest(4)
    for step in (4, 8):
        run.checkpoint(step).mkdir(parents=True)
    run.mark_latest(4)  # step_8 is half written
    found = run.latest_checkpoint()
    assert found is not None and (found.step, found.path) == (4, run.checkpoint(4))
    (run.checkpoints / "latest").write_text("../../etc")
    with pytest.raises(RuntimeError, match="expected step_N"):
        run.latest_checkpoint()


def test_json_with_nan_is_refused_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="null"):
        write_json(path, {"x": float("nan")})
    assert json.loads(path.read_text()) == {"x": 1} and list(tmp_path.iterdir()) == [path]
