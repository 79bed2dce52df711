"""Batches of steps skipped because of a non-finite loss or gradient, saved for debugging.

batch = read_bad_batch("runs/a/bad_batches/step_7_main.msgpack")
batch.suspects                      # uids of the samples with a number in them that is not finite
pack(batch.sequences)               # the batch itself, to be replayed on the checkpoint before
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marsrl.rollout.state import decode, encode
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.runs.directory import RunDirectory, write_atomically

KEPT_BAD_BATCHES = 8  # files; or max_bad_steps if that is larger


@dataclass(frozen=True, slots=True)
class BadBatch:
    """One skipped update: all ranks' sequences, and its results."""

    step: int
    policy: str
    version: int  # version of the weights
    loss: float
    grad_norm: float
    sequences: tuple[TrainSequence, ...]

    @property
    def suspects(self) -> list[str]:
        """Samples with a non-finite number among their inputs; empty if it arose in the model."""
        return [s.uid for s in self.sequences if not _is_finite(s)]

    @property
    def problem(self) -> str:
        """The problem in one line."""
        named = f"; not finite in the data of {', '.join(self.suspects[:4])}" if self.suspects else ""
        return f"loss {self.loss}, gradient norm {self.grad_norm} of policy {self.policy}{named}"


def bad_batch_file(run: RunDirectory, step: int, policy: str) -> Path:
    return run.bad_batches / f"step_{step}_{policy}.msgpack"


def save_bad_batch(run: RunDirectory, batch: BadBatch, *, keep: int) -> Path:
    """Write the batch and return the file; only the files of the last `keep` steps are kept."""
    path = bad_batch_file(run, batch.step, batch.policy)
    write_atomically(path, encode(batch))
    files = sorted(run.bad_batches.glob("step_*.msgpack"), key=lambda file: int(file.name.split("_")[1]))
    for old in files[:-keep]:
        old.unlink()
    return path


def read_bad_batch(path: str | Path) -> BadBatch:
    """Read a file of save_bad_batch."""
    return decode(BadBatch, Path(path).read_bytes())


def _is_finite(sequence: TrainSequence) -> bool:
    arrays = [a for a in (sequence.rollout_logprobs, sequence.token_advantages) if a is not None]
    return math.isfinite(sequence.advantage) and all(bool(np.isfinite(a).all()) for a in arrays)
