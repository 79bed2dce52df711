"""A step that is not finite leaves its batch, and the run stops after too many with the names of the files."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.data.bad_batches import bad_batch_file, read_bad_batch
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.run import Run
from marsrl.trainer.runs.directory import RunDirectory

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
