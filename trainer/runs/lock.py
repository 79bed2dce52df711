"""Lock of the single writer of a run directory, released when its process ends in any way."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from marsrl.trainer.runs.directory import RunDirectory

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Exclusive lock of a run directory, held by rank 0 from before its first write until its process ends.

    The kernel releases an flock when the last process that holds it dies, so kill -9 leaves nothing to clean up; the
    file stays and names its last holder. On NFS the lock works across hosts.

    warning: text for the user if the file system has no locks, so that a second run cannot be prevented.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Acquire the lock; ValueError names process and host if another process holds it."""
        self.warning: str | None = None
        try:
            self._file = open(run.lock, "a+", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
        except OSError as error:
            raise ValueError(
                f"run.name={run.path.name}: {run.path} is not writable ({error.strerror}), but a resumed run writes "
                "there; fix its permissions, or copy it into another run.dir"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(_held(run)) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.warning = (
                f"the file system of {run.path} has no file locks ({os.strerror(error.errno)}); make sure that no "
                "second run with this name starts"
            )
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @classmethod
    def of_out(cls, out: Path, warn: Callable[[str], None]) -> RunLock:
        """Create a command's folder --out and return its lock; ValueError for the folder of a run. warn: called with warnings."""
        if RunDirectory(out).has_begun:
            raise ValueError(f"--out {out} is the directory of a training run; name another folder")
        out.mkdir(parents=True, exist_ok=True)
        lock = cls(RunDirectory(out))
        if lock.warning is not None:
            warn(lock.warning)
        return lock

    def release(self) -> None:
        """Release the lock before the process ends; may be called twice."""
        self._file.close()


def why_held(run: RunDirectory) -> str:
    """Return why RunLock would fail now, or "". Writes nothing."""
    try:
        with open(run.lock, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _held(run)
    except OSError:  # There is no lock file, or the file system has no locks.
        return ""
    return ""


def standing(run: RunDirectory) -> str:
    """Return the run's state: "running", "finished", "stopped" (or killed), or "not finished" (no process is known).

    The run is not "running" if only the calling process holds its lock, to write a report.
    """
    why = why_held(run)
    if why and f" process {os.getpid()} on " not in why:
        return "running"
    return "finished" if run.summary.exists() else "stopped" if run.lock.exists() else "not finished"


def _held(run: RunDirectory) -> str:
    holder = run.lock.read_text("utf-8").strip() or "another process"
    return f"{run.path} is being written by {holder}; wait until that ends, stop it, or set another run.name (--out)"
