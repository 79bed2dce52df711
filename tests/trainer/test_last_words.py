"""What a failed run says last."""

from __future__ import annotations

import errno
from pathlib import Path

from marsrl.trainer.last_words import last_words
from marsrl.trainer.run_directory import RunDirectory


def test_a_failed_run_says_where_to_go_on(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "mine", "preset")
    error = RuntimeError("Ray is gone")
    assert last_words(error, run) == (
        "marsrl: the run failed: RuntimeError: Ray is gone; there is no checkpoint of it yet (run.checkpoint_every)"
    )
    run.checkpoint(12).mkdir(parents=True)
    run.mark_latest(12)
    assert last_words(error, run).endswith("(step 12) is whole: go on with run.name=mine run.resume=auto")
    (run.checkpoints / "latest").write_text("nonsense")
    assert "its last checkpoint cannot be told" in last_words(error, run)


def test_a_full_disk_is_named_wherever_it_was_met(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "mine", "preset")
    full = OSError(errno.ENOSPC, "No space left on device", str(run.metrics))
    wrapped = RuntimeError("the rollout's thread has failed")
    wrapped.__cause__ = full
    for error in (full, wrapped):
        words = last_words(error, run)
        assert f"no room on the disk of {run.metrics} (" in words and "MiB are free" in words
    assert "no room" not in last_words(PermissionError(errno.EACCES, "no"), run)
