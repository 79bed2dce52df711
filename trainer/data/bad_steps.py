"""Messages about steps without training, and saved batches of steps with a non-finite loss or gradient, for debugging.

batch = read_bad_batch("runs/a/bad_batches/step_7_main.msgpack")
batch.suspects                      # uids of the samples with a non-finite input
pack(batch.sequences)               # the batch, to replay on the preceding checkpoint
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from marsrl.rollout.player.stages import StepBatch
from marsrl.rollout.state import decode, encode
from marsrl.rollout.types import Finish
from marsrl.trainer.config import RunConfig
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.runs.directory import RunDirectory, write_atomically

KEPT_BAD_BATCHES = 8  # Files to keep, or trainer.max_bad_steps x policies if that is larger.


@dataclass(frozen=True, slots=True)
class BadBatch:
    """Skipped update: its sequences from all ranks, its loss and its gradient norm."""

    step: int
    policy: str
    version: int  # policy version of the weights
    loss: float
    grad_norm: float
    sequences: tuple[TrainSequence, ...]

    @property
    def suspects(self) -> list[str]:
        """Uids of samples with a non-finite input; empty if the non-finite value arose in the model."""
        return [s.uid for s in self.sequences if not _is_finite(s)]

    @property
    def problem(self) -> str:
        """Cause of the skipped update, in one line."""
        named = f"; not finite in the data of {', '.join(self.suspects[:4])}" if self.suspects else ""
        return f"loss {self.loss}, gradient norm {self.grad_norm} of policy {self.policy}{named}"


def bad_batch_file(run: RunDirectory, step: int, policy: str) -> Path:
    return run.bad_batches / f"step_{step}_{policy}.msgpack"


def save_bad_batch(run: RunDirectory, batch: BadBatch, *, keep: int) -> Path:
    """Write the batch and return the file; only the newest `keep` files are kept."""
    path = bad_batch_file(run, batch.step, batch.policy)
    write_atomically(path, encode(batch))
    files = sorted(run.bad_batches.glob("step_*.msgpack"), key=lambda file: int(file.name.split("_")[1]))
    for old in files[:-keep]:
        old.unlink()
    return path


def read_bad_batch(path: str | Path) -> BadBatch:
    return decode(BadBatch, Path(path).read_bytes())


def _is_finite(sequence: TrainSequence) -> bool:
    arrays = [a for a in (sequence.rollout_logprobs, sequence.token_advantages) if a is not None]
    return math.isfinite(sequence.advantage) and all(bool(np.isfinite(a).all()) for a in arrays)


def too_many_errors(batch: StepBatch, most: float) -> str:
    """Return a message if more than the share `most` of the batch's samples and episodes ended in an error, else ""."""
    samples = [sample for group in batch.groups for sample in group.samples]
    failed = [sample for sample in samples if sample.finish is Finish.ERROR]
    num_episodes = int(batch.metrics.get("rollout/failed_episodes", 0))
    num_errors, num_all = len(failed) + num_episodes, len(samples) + num_episodes
    if num_errors <= most * num_all:
        return ""
    first = f"; the first sample: {failed[0].uid}: {failed[0].reward.note[:200]}" if failed else ""
    return (
        f"{len(failed)} of {len(samples)} samples and {num_episodes} episodes ended in an error, more than "
        f"rollout.max_error_share = {most:g}{first}; see the warnings above and in the log"
    )


def why_nothing_trains(batch: StepBatch, config: RunConfig, num_steps: int) -> str:
    """Return a message that says why nothing was trained and which settings to change.

    num_steps: consecutive steps without a gradient. batch: the batch of the last of these steps.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    if not samples:
        num_long = int(batch.metrics.get("rollout/prompts_too_long", 0))
        too_long = "prompts were longer than agents.<name>.max_input_tokens; raise it, or leave long problems out of data.train"
        why = f"{num_long} {too_long}" if num_long else "no agent was called"
        return f"no completion arrived and none is in progress: {why}"
    trained = [sample for sample in samples if config.credit.trains(sample.agent)]
    missing = [sample for sample in trained if sample.reward.is_missing]
    masks = config.loss.truncated == "mask"
    cut = [sample for sample in trained if masks and sample.finish is Finish.LENGTH and not sample.reward.is_missing]
    parts = {
        "are of agents that are not trained (credit.train_agents)": len(samples) - len(trained),
        "have no reward": len(missing),
        "were cut at their maximum length (loss.truncated=mask)": len(cut),
        "have the same reward as all samples that they are compared with": len(trained) - len(missing) - len(cut),
    }
    counts = ", ".join(f"{number} {cause}" for cause, number in parts.items() if number)
    first = next((f" (the first: {sample.reward.note[:200]})" for sample in missing if sample.reward.note), "")
    return (
        f"no sample had a gradient in {num_steps} steps in a row (trainer.max_empty_steps); of the last step's {len(samples)} "
        f"samples {counts}{first}; see samples/ for prompts and answers"
    )
