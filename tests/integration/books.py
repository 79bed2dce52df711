"""Invariants of a run's directory, which hold after its processes have ended for any reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from marsrl.rollout.player.stages import RolloutState
from marsrl.rollout.state import decode
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import read_samples
from marsrl.trainer.report.token_log import read_tokens
from marsrl.trainer.runs.directory import RunDirectory, step_files
from marsrl.trainer.runs.manifest import damage


class Loss(Exception):
    """Raised if a run lost something, left processes or files behind, or reported something wrongly."""


def last_line(output: str) -> str:
    """Return the last line of a console's output that is ours; lines of torchrun follow it."""
    return next((line for line in reversed(output.splitlines()) if line.startswith("marsrl: ")), "")


def check_books(run: RunDirectory, group_size: int, damaged: Set[str] = frozenset()) -> None:
    """Check metrics, checkpoints, samples and instances of a run.

    damaged: checkpoints that may be damaged; with `latest`, that file may be damaged too.

    Raises Loss if something is missing or duplicated.
    """
    if not run.path.exists():
        return
    rows = [row.step for row in read_metrics(run.metrics)] if run.metrics.exists() else []
    if rows != list(range(1, len(rows) + 1)):
        raise Loss(f"metrics.jsonl has the steps {rows}")
    for step in run.steps_on_disk():
        folder = run.checkpoint(step)
        if folder.name not in damaged and (files := damage(folder)):
            raise Loss(f"{folder.name}: {'; '.join(files)}")
    latest = run.latest_checkpoint() if "latest" not in damaged else None
    if latest is None:
        return
    if len(rows) < latest.step:
        raise Loss(f"metrics.jsonl ends at {len(rows)}, the checkpoint is of step {latest.step}")
    _check_samples(run, latest.path, latest.step, group_size)
    _check_tokens(run)


def read_books(checkpoint: Path) -> RolloutState:
    return decode(RolloutState, (checkpoint / "rollout.msgpack").read_bytes())


@dataclass
class SessionsBook:
    """Compares the sessions that mischief.py records at `path` with those that the run has trained.

    num_played: number of starts of each session that was over when the run stopped.
    """

    path: Path
    num_played: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def check(self, run: RunDirectory) -> None:
        """Check that no finished session is played again, and that none is trained twice, even under different sample names.

        Raises Loss otherwise.
        """
        latest = run.latest_checkpoint() if run.path.exists() else None
        begun = Counter(line.split()[0] for line in self.lines() if line.endswith("begins"))
        if again := [name for name, number in self.num_played.items() if begun[name] != number]:
            raise Loss(f"sessions that were over and were played again: {again[:5]} ({len(again)})")
        if latest is None:
            return
        files = step_files(run.samples)
        trained = Counter(_play_of(s.uid) for step in range(1, latest.step + 1) for s in read_samples(files[step]))
        books = read_books(latest.path)
        kept = [sample for i in books.instances.values() for sample in i.held]
        kept += [sample for group in books.closed for sample in group.samples]
        kept += [sample for batch in books.ready for group in batch.groups for sample in group.samples]
        trained.update(_play_of(sample.uid) for sample in kept)
        if twice := [f"{session} {agent}" for (session, agent), number in trained.items() if number > 1]:
            raise Loss(f"sessions that occur twice: {twice[:5]} ({len(twice)})")
        episodes = [each for i in books.instances.values() for each in i.episodes.values()]
        over = {session for session, _ in trained} | {each.id for each in episodes if each.outputs}
        if never := sorted(over - begun.keys()):
            raise Loss(f"sessions that are over and were never begun: {never[:5]} ({len(never)})")
        self.num_played.update({name: begun[name] for name in over})


def _play_of(uid: str) -> tuple[str, str]:
    """Return (session, agent): `000001.0/solver#0.2:0` belongs to the third worker's attempt at the session."""
    session, _, name = uid.partition("/")
    return session, name.partition("#")[0].partition(":")[0]


def _check_samples(run: RunDirectory, checkpoint: Path, last: int, group_size: int) -> None:
    """Check that steps 1 to `last` repeat no sample, and that every drawn problem is in exactly one place: its Solver's group was
    trained, or the checkpoint's state has the group, its ask or its open sessions.
    """
    files = step_files(run.samples)
    uids: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    for step in range(1, last + 1):
        if step not in files:
            raise Loss(f"the samples of step {step} are missing")
        samples = list(read_samples(files[step]))
        of_step = Counter(sample.group_id for sample in samples)
        uids.update(sample.uid for sample in samples)
        groups.update({sample.group_id for sample in samples})
        if broken := [group for group, count in of_step.items() if count != group_size]:
            raise Loss(f"step {step}: groups that are not of {group_size} samples: {broken}")
    books = read_books(checkpoint)
    asks = [*(opened.ask for opened in books.open.values()), *books.pending]
    if twice := [ask for ask, count in Counter(ask.id for ask in asks).items() if count > 1]:
        raise Loss(f"asks that occur twice: {twice[:5]} ({len(twice)})")
    held = {sample.group_id for instance in books.instances.values() for sample in instance.held}
    groups.update(held | {ask.group for ask in asks})
    groups.update([*(g.group_id for g in books.closed), *(g.group_id for batch in books.ready for g in batch.groups)])
    if twice := [uid for uid, count in uids.items() if count > 1]:
        raise Loss(f"samples that were trained twice: {twice[:5]} ({len(twice)})")
    if twice := [group for group, count in groups.items() if count > 1]:
        raise Loss(f"groups that occur twice: {twice[:5]} ({len(twice)})")
    drawn = {f"{number:06d}" for number in range(1, books.num_instances + 1)}
    there = {group.partition("/")[0] for group in groups if group.endswith("/solver")}
    open_sessions = [each for i in books.instances.values() for each in i.episodes.values() if each.open_calls]
    there |= {session.rollout_id for session in open_sessions}  # open sessions are played again from their beginning
    if drawn != there:
        raise Loss(f"instances lost: {sorted(drawn - there)[:5]}, unknown: {sorted(there - drawn)[:5]}")


def _check_tokens(run: RunDirectory) -> None:
    """Check that logged tokens are complete, and belong to the step's samples."""
    files = step_files(run.samples)
    for step, file in step_files(run.tokens).items():
        samples, log = list(read_samples(files[step])), read_tokens(file)
        if {record.step for record in log} - {step} or len({record.uid for record in log}) != len(log):
            raise Loss(f"{file.name} has a record of another step, or a sample twice")
        for record in log:
            sample = samples[record.line - 1]
            if (record.uid, record.segments) != (sample.uid, sample.segments) or not record.text.startswith(
                sample.text
            ):
                raise Loss(f"{file.name}: the tokens of {record.uid} are not those of line {record.line}, {sample.uid}")
