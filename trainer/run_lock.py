"""One run at a time writes a run directory: a lock that ends with the process that holds it, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket

from marsrl.trainer.run_directory import RunDirectory

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Rank 0 takes it before it writes anything and holds it until its process ends.

    The kernel lets go of an flock when the last process that holds it dies, so kill -9 leaves nothing to clean up; the
    file stays and says who held it last. On NFS the lock holds across hosts.

    warning: what to tell the user where the file system knows no locks; then nothing keeps a second run out.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Raises ValueError when another process holds it; the text names process and host."""
        self.warning: str | None = None
        self._file = open(run.lock, "a+", encoding="utf-8")  # noqa: SIM115 - for the life of the process
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read(200).strip() or "another process"
            self._file.close()
            raise ValueError(
                f"{run.path} is being written by {holder}; wait until it has ended, stop it, or take another run.name"
            ) from None
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

    def release(self) -> None:
        """Let go before the process ends; may be called twice."""
        self._file.close()
