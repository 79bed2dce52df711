"""Last words of a failed run; a step that is not finite leaves its batch, and the run stops after too many with their names."""

from __future__ import annotations

import dataclasses
import errno
import math
from pathlib import Path

import numpy as np
import pytest

from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector
from marsrl.rollout.weights.files import parent_of
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.data.bad_steps import bad_batch_file, read_bad_batch
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.run import Run
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


FINE = StepStats(1.0, 1.0, 0.1, True, False, False, {}, 0, 0.0, 0.0, 0.0, ())
BAD = dataclasses.replace(FINE, loss=math.nan, is_updated=False, is_skipped=True)


def sample(uid: str, advantage: float) -> TrainSequence:
    tokens = np.arange(3, dtype=np.int32)
    return TrainSequence(uid, tokens, tokens, np.ones(3, bool), np.zeros(3, np.float32), advantage, 0, 1.0)


def test_the_run_stops_after_too_many_in_a_row_and_names_their_batches(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run", "preset")
    agents = VerifierCorrector.whole_team({})
    config = RunConfig(
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        agents={name: agent.model_copy(update={"policy": "a"}) for name, agent in agents.items()},
    )
    run = Run(config, directory, RunConsole(0), dict.fromkeys(["a", "b"]), {}, None, {})  # type: ignore[arg-type]
    batches = (MiniBatch((sample("x", 1.0), sample("y", math.nan)), 6),)
    for run.step, stats in enumerate([BAD, BAD, FINE, BAD, BAD], start=1):
        run.note_step("a", stats, batches)
        run.note_step("b", FINE, batches)  # another policy's luck does not count for this one
        run.stop_if_diverged()
    run.step = 6
    run.note_step("a", BAD, batches)
    with pytest.raises(RuntimeError, match="policy a was not finite in 3 steps in a row") as error:
        run.stop_if_diverged()
    for step in (4, 5, 6):
        path = bad_batch_file(directory, step, "a")
        assert str(path) in str(error.value)
        batch = read_bad_batch(path)
        assert batch.suspects == ["y"] and [s.uid for s in batch.sequences] == ["x", "y"] and math.isnan(batch.loss)
