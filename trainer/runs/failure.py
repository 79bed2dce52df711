"""Final message of a failed run: the error in one line, advice for a full disk, and how to resume."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from marsrl.trainer.runs.directory import CheckpointError, RunDirectory
from marsrl.trainer.runs.manifest import missing_or_cut
from marsrl.trainer.visible import visible

RANK_0_PRINTS_S = 30.0
"""Seconds that other ranks wait before they exit with a common error, so that rank 0 can print it: torchrun kills all ranks once
one has failed."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def say_last(text: str) -> None:
    """Print the final line of this process, and pass it to torchrun, whose summary then ends with it."""
    text = visible(text)  # torchrun prints it without escaping.
    print(text, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):  # The disk may be full, and the line is already printed.
            Path(path).write_text(json.dumps(report), encoding="ascii")


def failure_message(error: BaseException, run: RunDirectory, weights: Path | None = None) -> str:
    """Return one paragraph for the console, to follow the traceback. Reads the run's directory, writes nothing.

    weights: folder of the weight files, for a run with engines.
    """
    parts = [f"marsrl: the run failed: {type(error).__name__}: {error}"]
    full = next((cause for cause in _chain(error) if isinstance(cause, OSError) and cause.errno in _FULL), None)
    if full is not None:
        parts.append(_no_room(full, run, weights))
    if not isinstance(error, CheckpointError):  # Its message already says how to resume.
        parts.append(where_to_go_on(run, is_refused=isinstance(error, ValueError)))
    return "; ".join(parts)


def where_to_go_on(run: RunDirectory, *, is_refused: bool = False) -> str:
    """Return text with the settings that resume the run, or a note that there is nothing to resume.

    is_refused: the same command would be rejected again unless the error is fixed.
    """
    command = f"run.name={run.path.name} run.resume="
    action = "after fixing this, resume" if is_refused else "resume"
    try:
        latest = run.latest_checkpoint()
    except (OSError, CheckpointError) as error:
        return f"its last checkpoint is unknown: {error}; {command}previous resumes from the newest intact one"
    if latest is None:
        again = f"{command}auto begins again at step 1" if run.has_begun else "its name can be reused"
        return f"it has no checkpoint yet (run.checkpoint_every): {again}"
    if problem := missing_or_cut(latest.path):
        earlier = [
            step for step in run.steps_on_disk() if step < latest.step and not missing_or_cut(run.checkpoint(step))
        ]
        back = f"{command}previous goes back to step_{earlier[-1]}" if earlier else "no earlier one is intact"
        return f"checkpoint {latest.path} is damaged ({problem}): {back}"
    return (
        f"checkpoint {latest.path} (step {latest.step}) is intact: {action} by adding {command}auto to the same command"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _no_room(error: OSError, run: RunDirectory, weights: Path | None) -> str:
    """Return text that names the full disk, and the settings that reduce or move what is written."""
    advice = {run.path: "run.keep_checkpoints, another run.dir"}
    advice |= {weights: "another sync.directory"} if weights is not None else {}
    named = Path(error.filename) if error.filename else run.path
    where = next((folder for folder in advice if named.is_relative_to(folder)), named.parent)
    settings, free = f" ({advice[where]})" if where in advice else "", ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(where).free / 2**20:.0f} MiB are free at {where})"
    return f"no space left on the disk of {named}{free}: free some{settings}"
