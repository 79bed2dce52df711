"""Last words of a failed run."""

from __future__ import annotations

import errno
from pathlib import Path

from marsrl.rollout.weights.files import parent_of
from marsrl.trainer.runs.directory import CheckpointError, RunDirectory
from marsrl.trainer.runs.failure import failure_message, where_to_go_on
from marsrl.trainer.runs.manifest import write_manifest


def whole_checkpoint(run: RunDirectory, step: int) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"1234")
    write_manifest(folder, {})
    run.mark_latest(step)
    return folder


def test_a_failed_run_says_where_to_go_on(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "mine", "preset")
    error = RuntimeError("Ray is gone")

    def said(error: Exception = error) -> str:
        return failure_message(error, run, parent_of())

    none_yet = (
        "marsrl: the run failed: RuntimeError: Ray is gone; there is no checkpoint of it yet (run.checkpoint_every): "
    )
    assert said() == none_yet + "its name is free again"
    run.metrics.write_text('{"step": 1}\n')
    assert said() == none_yet + "run.name=mine run.resume=auto begins again at step 1"
    whole_checkpoint(run, 12)
    resumed = "go on with run.name=mine run.resume=auto, added to the same command"
    assert said().endswith(f"(step 12) is whole: {resumed}")
    assert said(ValueError("other data")).endswith(f"is whole: with that set right, {resumed}")
    (run.checkpoints / "latest").write_text("nonsense")
    assert "its last checkpoint cannot be told" in said()
    assert said().endswith("run.resume=previous takes the newest whole one")


def test_a_checkpoint_that_is_damaged_is_not_called_whole(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "mine", "preset")
    first, second = whole_checkpoint(run, 4), whole_checkpoint(run, 8)
    (second / "weights").write_bytes(b"123")
    said = where_to_go_on(run)
    assert f"checkpoint {second} is damaged ({second}/weights has 3 bytes, expected 4): run.name=mine" in said
    assert said.endswith("run.resume=previous goes back to step_4")
    (first / "manifest.json").unlink()
    assert where_to_go_on(run).endswith(": no earlier one is whole")
    told = CheckpointError("step_8 is damaged; go on from step_4 with run.resume=previous")
    said = failure_message(told, run, parent_of())
    assert said == f"marsrl: the run failed: CheckpointError: {told}"  # and not: go on with auto


def test_a_full_disk_is_named_wherever_it_was_met(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "mine", "preset")
    full = OSError(errno.ENOSPC, "No space left on device", str(run.metrics))
    wrapped = RuntimeError("the rollout's thread has failed")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        words = failure_message(error, run, parent_of())
        assert f"no room on the disk of {run.metrics} (" in words and f"MiB are free at {run.path}" in words
        assert "make some (run.keep_checkpoints, another run.dir)" in words
    assert "no room" not in failure_message(PermissionError(errno.EACCES, "no"), run, parent_of())
