"""A cgroup for each interpreter: limits for all processes of a call together.

setrlimit limits a process, or a user. A cgroup limits the sum, if this machine has version 2 and lets the trainer create one with
the controllers `memory` and `pids`:

    /proc/self/cgroup -> the trainer's own cgroup, else the one around it -> marsrl-python-PID-N, one an interpreter

The one around it, because a cgroup that contains processes gives its children no controllers (cgroups(7), "no internal
processes"), and the trainer's contains the trainer. As with namespaces, no version number tells what is allowed: the check
creates a cgroup and puts a process into it.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.tools.config import PythonTool

_log = logging.getLogger(__name__)

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NAME = "marsrl-python-"
_LAUNCHERS = 4  # upper bound of bubblewrap's processes beside the snippet's
_TRIED_S = 10.0
_EMPTY_S = 2.0  # until the kernel has ended the last process of a cgroup

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A new cgroup without processes."""

    path: Path

    @property
    def entering(self) -> tuple[str, ...]:
        """The command prefix that enters the cgroup and then becomes the command that follows."""
        return ("sh", "-c", 'echo 0 >"$0" && exec "$@"', str(self.path / "cgroup.procs"))

    def end(self) -> None:
        """End its processes and remove it; if that fails it is left behind, with a warning."""
        deadline = time.monotonic() + _EMPTY_S
        try:
            kill = self.path / "cgroup.kill"  # Linux 5.14
            if kill.exists():
                kill.write_text("1")
            while True:
                try:
                    return os.rmdir(self.path)
                except OSError as error:
                    if error.errno != errno.EBUSY or time.monotonic() > deadline:
                        raise
                time.sleep(0.005)
        except OSError as error:
            _log.warning("tool python: the cgroup %s is left behind: %s", self.path, error)


def make_cgroup(parent: Path, config: PythonTool) -> Cgroup:
    """A new cgroup with its limits. OSError: it cannot be created, or lacks a limit."""
    limits = {
        "memory.max": str((config.memory_mib + config.tmp_mib) << 20),  # files in /tmp count as memory
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(config.processes + _LAUNCHERS),
    }
    cgroup = Cgroup(parent / f"{_NAME}{os.getpid()}-{next(_numbers)}")
    os.mkdir(cgroup.path)
    try:
        for name, limit in limits.items():
            file = cgroup.path / name
            if name == "memory.swap.max" and not file.exists():  # this kernel does not account swap
                continue
            # never create a file: the controller does, unless it is missing
            with open(os.open(file, os.O_WRONLY), "w") as opened:
                opened.write(limit)
    except OSError:
        cgroup.end()
        raise
    return cgroup


def find_cgroups(config: PythonTool) -> tuple[Path | None, str]:
    """(the parent for interpreters' cgroups or None, the reason for None)."""
    if not (_ROOT / "cgroup.controllers").exists():
        return None, f"{_ROOT} is no cgroup of version 2"
    [name] = [line[3:] for line in _OWN.read_text().splitlines() if line.startswith("0::")]
    own = _ROOT / name.lstrip("/")
    reasons = []
    for parent in (own, own.parent) if own != _ROOT else (own,):
        try:
            _remove_left(parent)
            if parent == own:
                (own / "cgroup.subtree_control").write_text("+memory +pids")
            _try(parent, config)
            return parent, ""
        except OSError as error:
            reasons.append(f"{parent}: {error}")
    return None, "; ".join(reasons)


def _try(parent: Path, config: PythonTool) -> None:
    """Raises OSError if a cgroup cannot be created, or a process cannot be put into it."""
    cgroup = make_cgroup(parent, config)
    try:
        done = subprocess.run([*cgroup.entering, "true"], capture_output=True, text=True, timeout=_TRIED_S)
        if done.returncode != 0:
            raise OSError(f"no process can be put into a cgroup there ({done.stderr.strip()})")
    finally:
        cgroup.end()


def _remove_left(parent: Path) -> None:
    """Remove the empty cgroups of trainers that were killed; those with processes refuse to go."""
    for path in parent.glob(f"{_NAME}*"):
        if not os.path.exists(f"/proc/{path.name.removeprefix(_NAME).partition('-')[0]}"):
            with suppress(OSError):  # another user's, not empty, or gone already
                os.rmdir(path)
