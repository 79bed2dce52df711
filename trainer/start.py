"""Start of a run from its settings, shared by trainer/main.py and marsrl.train."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

from marsrl.trainer.checks.preflight import Checked, preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.origin import ConfigOrigin
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import keep_settings, outlook, resume_lines, settings_to_resume
from marsrl.trainer.runs.lock import RunLock
from marsrl.trainer.torchrun import is_rank_0, world_size


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run with checked settings.

    directory, lock: None on ranks other than 0, and in a dry run.
    text: summary to print: origin of the settings, results of the checks, and use of the run directory.
    """

    checked: Checked
    directory: RunDirectory | None
    lock: RunLock | None
    text: str


def prepare(config: RunConfig, origin: ConfigOrigin, *, is_dry: bool = False) -> PreparedRun:
    """Check the settings, and create the run's directory or open the directory to resume in.

    is_dry: create nothing, and report how run.name would be used.

    Raises ValueError, OSError: settings or files cannot be used, or another process writes the run.
    """
    is_first, lines = is_rank_0(), list[str]()
    directory = lock = None
    with ExitStack() as undo, origin.places_in_errors():
        began = settings_to_resume(config) if is_first else None  # Other ranks get the dtypes from rank 0.
        checked = preflight(config, world_size=world_size(), began=began)
        run = checked.config.run
        if is_first and is_dry:
            lines = outlook(checked.config, origin.name, checked.fingerprints())
        elif is_first:
            directory = RunDirectory.create(run.dir, run.name, origin.name, run.resume)
            lock = RunLock(directory)
            undo.callback(lock.release)
            if lock.warning is not None:
                print(f"marsrl: warning: {lock.warning}", file=sys.stderr, flush=True)
            fingerprints = checked.fingerprints()
            if run.resume != "off" and directory.existed:
                lines = resume_lines(directory, checked.config, fingerprints)
            keep_settings(directory, checked.config, str(origin))
            directory.keep_data(fingerprints)
        undo.pop_all()
    return PreparedRun(checked, directory, lock, "\n".join([f"# settings: {origin}", checked.text(), *lines]))
