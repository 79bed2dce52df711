"""Checkpoints, written atomically: learners of all policies, state of the rollout, and metadata.

checkpoints/step_12/policies/main/...   Megatron distributed checkpoint (all ranks write their part)
checkpoints/step_12/rollout.msgpack     open episodes, stages and counts (rank 0); absent in supervised training
checkpoints/step_12/meta.json           step, policy versions (rank 0)
checkpoints/step_12/manifest.json       size and checksum of every file (manifest.py)
checkpoints/latest                      updated last, when everything above is on disk
checkpoints/best                        names the checkpoint with the best evaluation (run.keep_best)

A save goes into step_12.part, which is renamed when complete:

    begin: plan, copy        write: each rank writes its files        end: index, manifest, rename, latest
    all ranks together       at once, or in a thread during training  all ranks together

With run.async_checkpoint, a thread writes. After each training step the ranks check whether all have written; if so, they end the
save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Literal

from torch.distributed.checkpoint import CheckpointException

from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode, encode
from marsrl.rollout.text import first_line
from marsrl.trainer.config.sections import RunSection
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.runs.collective import all_true, broadcast_bytes, gather_bytes, rank, stopping_together, world_size
from marsrl.trainer.runs.directory import (
    CheckpointError,
    RunDirectory,
    sync_tree,
    write_atomically,
    write_json,
)
from marsrl.trainer.runs.manifest import FileSum, damage, write_manifest

if TYPE_CHECKING:
    from marsrl.trainer.learner.megatron.checkpoint_store import PendingSave


@dataclass(frozen=True, slots=True)
class Restored:
    """State to resume from. step: the last step in the checkpoint. rollout: state of the rollout; None in supervised training."""

    step: int
    versions: dict[str, int]
    rollout: RolloutState | None


@dataclass(frozen=True, slots=True)
class _Pending:
    """Save in progress."""

    step: int
    policies: Mapping[str, PendingSave]
    writer: Thread


class CheckpointWriter:
    """Writer of checkpoints, one at a time. Every method is collective.

    keep_last: number of recent checkpoints to keep; keep_every: also keep checkpoints of steps divisible by this (0: none).
    keep_best: also keep the checkpoint with the best evaluation.
    """

    def __init__(self, run: RunDirectory, *, keep_last: int, keep_every: int, keep_best: bool, is_async: bool) -> None:
        self._run, self._keep_last, self._keep_every, self._is_async = run, keep_last, keep_every, is_async
        self._keep_best = keep_best
        self._pending: _Pending | None = None

    def save(
        self, step: int, versions: Mapping[str, int], learners: Mapping[str, Learner], rollout: RolloutState | None
    ) -> None:
        """Save a checkpoint after `step`. Return when it is complete, or, if saves are asynchronous, once the state is copied.

        A save in progress is finished first.

        rollout: state of the rollout on rank 0; None elsewhere, and in supervised training.

        Raises RuntimeError, on all ranks, if a rank could not write (disk full, no permission); earlier checkpoints stay.
        """
        self.finish()
        part = self._part(step)
        with self._cleared(step), stopping_together(self._failure(step), OSError):
            if rank() == 0:
                for leftover in self._run.checkpoints.glob("step_*.part"):  # Left by a run that died while saving.
                    shutil.rmtree(leftover)
                if rollout is not None:
                    write_atomically(part / "rollout.msgpack", encode(rollout))
                write_json(part / "meta.json", {"step": step, "versions": dict(versions)})
        copy = self._is_async
        policies = {name: learner.begin_save(part / "policies" / name, copy=copy) for name, learner in learners.items()}
        # A daemon thread does not delay the exit of an interrupted run; its partial files are never used.
        writer = Thread(target=_write, args=(policies,), name=f"checkpoint {step}", daemon=True)
        self._pending = _Pending(step, policies, writer)
        if self._is_async:
            writer.start()
        else:
            writer.run()
            self.finish()

    def finish_if_written(self) -> None:
        """Finish the save in progress if every rank has written its part."""
        if self._pending is not None and all_true(not self._pending.writer.is_alive()):
            self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and finish it: manifest, rename, latest, removal of older checkpoints.

        Raises RuntimeError, on all ranks, if a rank could not write.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.writer.is_alive():
            pending.writer.join()
        sums_of_files, failure = dict[str, FileSum](), self._failure(pending.step)
        with self._cleared(pending.step):
            for name, pending_save in pending.policies.items():
                sums = pending_save.finish(failure)
                sums_of_files.update({f"policies/{name}/{file}": file_sum for file, file_sum in sums.items()})
            with stopping_together(failure, OSError):
                if rank() == 0:
                    self._put_in_place(pending.step, sums_of_files)

    def _put_in_place(self, step: int, known: Mapping[str, FileSum]) -> None:
        part, final = self._part(step), self._run.checkpoint(step)
        write_manifest(part, known)
        sync_tree(part)
        if final.exists():  # The run resumed from an earlier step and has repeated this one.
            shutil.rmtree(final)
        os.rename(part, final)
        self._run.mark_latest(step)
        self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        """Remove old checkpoints. After a resume from an earlier step, later checkpoints stay until their step is repeated."""
        past = [other for other in self._run.steps_on_disk() if other <= step]
        best = self._run.mark_best() if self._keep_best else None
        for old_step in past[: -self._keep_last]:
            if old_step != best and not (self._keep_every and old_step % self._keep_every == 0):
                # Rename first, so that a run killed meanwhile leaves no partial checkpoint.
                shutil.rmtree(self._run.checkpoint(old_step).rename(self._part(old_step)))

    @contextlib.contextmanager
    def _cleared(self, step: int) -> Iterator[None]:
        """If the body fails, remove as much of the partial checkpoint as possible, because it may have filled the disk."""
        try:
            yield
        except RuntimeError:
            if rank() == 0:
                shutil.rmtree(self._part(step), ignore_errors=True)
            raise

    def _part(self, step: int) -> Path:
        final = self._run.checkpoint(step)
        return final.with_name(f"{final.name}.part")

    def _failure(self, step: int) -> str:
        return f"the checkpoint of step {step} was not written ({self._part(step)}); free disk space, or fix what the error names"


def is_due(
    run: RunSection, step: int, *, last: int, saved_s: float, is_asked: bool, is_best: bool = False
) -> tuple[bool, bool]:
    """Return (a checkpoint is due after `step`, the run must stop), the same on all ranks. Collective.

    saved_s: time.monotonic() of the last save. is_asked: this rank received a stop signal (Ctrl-C or SIGTERM). is_best: the
    step has the best evaluation so far (only rank 0's value counts).
    """
    is_late = bool(run.checkpoint_minutes) and time.monotonic() - saved_s >= 60 * run.checkpoint_minutes
    answers = [decode(tuple[bool, bool], part) for part in gather_bytes(encode((is_asked, is_late or is_best)))]
    is_stopping = any(asked for asked, _ in answers)
    _, is_wanted = answers[0]  # Rank 0's clock and evaluation decide.
    every = run.checkpoint_every
    return is_stopping or is_wanted or step == last or bool(every and step % every == 0), is_stopping


def load_checkpoint(
    run: RunDirectory, learners: Mapping[str, Learner], resume: Literal["auto", "previous"], warn: Callable[[str], None]
) -> Restored | None:
    """Restore every learner, and return the step, versions and rollout; None if the run has no checkpoint yet. Collective.

    All files are compared with the manifest before they are used. If the checkpoint that `latest` names is damaged, or `latest`
    names none, resume="auto" stops and names the newest intact one; resume="previous" uses that one and reports how many
    steps are lost. Afterwards `latest` names the restored checkpoint.

    An adapter that the checkpoint lacks keeps its initial weights. A policy of the checkpoint that has no learner is dropped.
    Both are reported.

    Raises CheckpointError, on all ranks, if files are damaged (the message says what was found and expected in each), if no
    checkpoint is intact, or if weights do not fit the model.
    """
    latest, problem = _latest(run)
    if latest is None and problem is None:
        return None
    if latest is not None:
        newer = [step for step in run.steps_on_disk() if step > latest]
        if newer:
            warn(f"checkpoints/latest names step {latest}; later checkpoints {newer} are ignored")
        if files := _damage(run.checkpoint(latest)):
            more = " ..." if files[8:] else ""
            problem = f"checkpoint {run.checkpoint(latest)} is damaged: {'; '.join(files[:8])}{more}"
    step = latest if problem is None else _go_back(run, latest, problem, resume, warn)
    assert step is not None
    if rank() == 0:
        run.mark_latest(step)  # Before training, so that no new checkpoint replaces the folder that `latest` names.
    folder = run.checkpoint(step)
    meta = json.loads((folder / "meta.json").read_bytes())
    saved = {path.name for path in (folder / "policies").iterdir()}
    added, removed = [name for name in learners if name not in saved], sorted(saved - learners.keys())
    for name, learner in learners.items():
        if name in added and learner.adapter is not None:
            warn(f"adapter {name} is not in checkpoint {folder}: it begins as in a new run, at version 0")
            continue
        try:
            learner.load(folder / "policies" / name)
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception.
            raise CheckpointError(
                f"policy {name} of {folder} is intact but could not be loaded ({type(error).__name__}: "
                f"{first_line(error)}): its model, dtype or optimizer differs from these settings; set "
                "them back to the run's config.yaml"
            ) from error
    file = folder / "rollout.msgpack"
    rollout = decode(RolloutState, file.read_bytes()) if file.is_file() else None
    if removed:
        warn(f"{', '.join(removed)} of checkpoint {folder} is not trained any more: its weights are dropped")
    if rollout is not None and (added or removed):
        warn("agents may have changed their policies: unfinished problems are dropped, and new ones are drawn")
        rollout = rollout.without_work()
    versions = {str(name): int(version) for name, version in meta["versions"].items() if name not in removed}
    return Restored(step, versions, rollout)


def _latest(run: RunDirectory) -> tuple[int | None, str | None]:
    """Read `latest` on rank 0; return (step, error in the file) on all ranks. Collective."""
    step, problem = None, None
    if rank() == 0:
        try:
            latest = run.latest_checkpoint()
            step = latest.step if latest is not None else None
        except (RuntimeError, OSError) as error:
            problem = str(error).encode("utf-8", "backslashreplace").decode()  # A path may not be UTF-8.
    answer = broadcast_bytes(encode((step, problem)) if rank() == 0 else None)
    return decode(tuple[int | None, str | None], answer)


def _go_back(run: RunDirectory, latest: int | None, problem: str, resume: str, warn: Callable[[str], None]) -> int:
    """Return the step of the newest intact checkpoint (older than `latest`, if given); CheckpointError unless resume=previous."""
    for step in reversed([earlier for earlier in run.steps_on_disk() if latest is None or earlier < latest]):
        if not _damage(run.checkpoint(step)):
            break
    else:
        raise CheckpointError(f"{problem}; no other checkpoint is intact: restore the files, or start another run")
    again = f", which repeats {latest - step} step(s)" if latest is not None else ""
    if resume != "previous":
        raise CheckpointError(
            f"{problem}; the newest intact one is step_{step}: restore the files, or resume from step_{step} with "
            f"run.resume=previous{again}"
        )
    warn(f"{problem}; GOING BACK to step_{step} (run.resume=previous){again}")
    return step


def _damage(folder: Path) -> list[str]:
    """Check the files, divided among the ranks; return the same list of damage on all ranks. Collective."""
    damage_of_ranks = [decode(list[str], part) for part in gather_bytes(encode(damage(folder, rank(), world_size())))]
    return sorted({line for part in damage_of_ranks for line in part})


def _write(policies: Mapping[str, PendingSave]) -> None:
    for pending_save in policies.values():
        pending_save.write()
