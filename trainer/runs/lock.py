"""A lock for the single writer of a run directory, which is released with its process, however that ends."""

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
    """Rank 0 acquires it before it writes anything, and holds it until its process ends.

    The kernel releases an flock when the last process that holds it dies, so kill -9 leaves nothing to clean up; the
    file stays and names its last holder. On NFS the lock works across hosts.

    warning: for the user, if the file system has no locks, and so nothing prevents a second run.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Raises ValueError, which names process and host, if another process holds it."""
        self.warning: str | None = None
        try:
            self._file = open(run.lock, "a+", encoding="utf-8")  # noqa: SIM115 - for the life of the process
        except OSError as error:
            raise ValueError(
                f"run.name={run.path.name}: {run.path} cannot be written to ({error.strerror}); a run that goes on writes "
                "there: fix its permissions, or copy it into another run.dir"
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
                f"the file system of {run.path} has no file locks ({os.strerror(error.errno)}): see to it yourself that no "
                "second run of this name starts"
            )
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @classmethod
    def of_out(cls, out: Path, warn: Callable[[str], None]) -> RunLock:
        """The lock of a command's folder --out, which is made; ValueError if a run has it. warn: gets its warning, if any."""
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
    """The reason why RunLock would fail now, or "". Writes nothing."""
    try:
        with open(run.lock, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _held(run)
    except OSError:  # there is no file, or a file system without locks
        return ""
    return ""


def standing(run: RunDirectory) -> str:
    """running: another process writes the run (one that writes its own report has ended); finished; stopped, or killed; not
    finished: no process is known to have written it."""
    held = why_held(run)
    if held and f" process {os.getpid()} on " not in held:
        return "running"
    return "finished" if run.summary.exists() else "stopped" if run.lock.exists() else "not finished"


def _held(run: RunDirectory) -> str:
    holder = run.lock.read_text("utf-8").strip() or "another process"
    return (
        f"{run.path} is being written by {holder}; wait until it has ended, stop it, or take another run.name (--out)"
    )
