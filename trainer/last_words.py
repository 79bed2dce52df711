"""What a run that failed says last: the error in a line, what can be done about a full disk, and where to go on from."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator

from marsrl.trainer.run_directory import RunDirectory

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def last_words(error: BaseException, run: RunDirectory) -> str:
    """One paragraph for the console, behind the traceback. Reads the run's directory, writes nothing."""
    parts = [f"marsrl: the run failed: {type(error).__name__}: {error}"]
    full = next((each for each in _chain(error) if isinstance(each, OSError) and each.errno in _FULL), None)
    if full is not None:
        where = full.filename or run.path
        parts.append(f"no room on the disk of {where}{_free(run)}: make some (run.keep_checkpoints, other run.dir)")
    parts.append(where_to_go_on(run))
    return "; ".join(parts)


def where_to_go_on(run: RunDirectory) -> str:
    """The words with which the run is resumed, or that there is nothing to resume."""
    try:
        latest = run.latest_checkpoint()
    except (OSError, RuntimeError) as error:
        return f"its last checkpoint cannot be told: {error}"
    if latest is None:
        return "there is no checkpoint of it yet (run.checkpoint_every)"
    name = run.path.name
    return f"checkpoint {latest.path} (step {latest.step}) is whole: go on with run.name={name} run.resume=auto"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _free(run: RunDirectory) -> str:
    with contextlib.suppress(OSError):  # only words: the error itself is told
        return f" ({shutil.disk_usage(run.path).free / 2**20:.0f} MiB are free at {run.path})"
    return ""
