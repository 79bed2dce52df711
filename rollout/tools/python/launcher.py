"""Launcher of sandboxed interpreters, which bubblewrap isolates from the rest of the machine.

bubblewrap gives an interpreter its own file system root, with a read-only system and a small /tmp, and its own namespaces of
processes, network, IPC and host name; guest.py adds limits and a seccomp filter. Whether this works depends on kernel, container
and user, and cannot be derived from version numbers, so check_sandbox starts an interpreter.

As root, the interpreter is started without a user namespace, and the guest then switches to an unused user id. In a user
namespace the kernel would still treat it as root, who may write settings in /proc/sys and is exempt from the limit on processes.
Other users get a user namespace.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.python.interpreter import Interpreter, StartError
from marsrl.rollout.tools.python.seccomp import seccomp_filter

_TMP_INODES = 4096
_FILES = 128  # maximum open files of a process
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FIRST_UID = 1 << 30  # unused user ids: no system assigns these by default
_LOOK_S = 20.0
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # because each thread counts as a process in the limit
    "OPENBLAS_NUM_THREADS": "1",
}
_KERNEL_SETTINGS = Path("/proc/sys")
# Kernel settings that deny user namespaces to ordinary users, and remedies.
_IN_THE_WAY = {
    ("kernel.apparmor_restrict_unprivileged_userns", "1"): (
        "AppArmor takes all rights from user namespaces, as on Ubuntu from 23.10 on; as root, run `sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0`, or add a profile for bubblewrap alone (docs/python.md)"
    ),
    ("kernel.unprivileged_userns_clone", "0"): "as root, `sysctl -w kernel.unprivileged_userns_clone=1`",
    ("user.max_user_namespaces", "0"): "as root, `sysctl -w user.max_user_namespaces=15000`",
}
_LOOK = """
import fractions, os  # fractions: a module that it has not yet loaded
status = open("/proc/self/status").read()
assert "Seccomp:\t2" in status, "no seccomp filter"
assert "CapEff:\t0000000000000000" in status, "capabilities"
assert not os.path.exists("/etc/passwd"), "the host's files"
assert not os.access("/proc/sys/kernel/core_pattern", os.W_OK), "kernel settings that it can write"
print("isolated")
"""


def start_interpreter(config: PythonTool) -> Interpreter:
    """Start an interpreter; it may not be ready yet. OSError: there is no bubblewrap, or no process can be created."""
    is_root = _is_root()
    settings = {
        "uid": _spare_uid() if is_root else 0,
        "tmp_inodes": _TMP_INODES,
        "limits": {
            "RLIMIT_AS": config.memory_mib << 20,
            "RLIMIT_CPU": config.cpu_s,
            "RLIMIT_NPROC": config.processes,
            "RLIMIT_FSIZE": config.tmp_mib << 20,
            "RLIMIT_NOFILE": _FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 64,
        },
        "filter": seccomp_filter().hex(),
        "packages": [str(Path(config.packages).resolve())] if config.packages else [],
        "preload": config.preload,
    }
    guest = Path(__file__).with_name("guest.py").read_text(encoding="utf-8")
    # Use the interpreter outside any virtual environment.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    python_words = (python, "-I", "-S", "-B", "-X", "utf8", "-c", guest, json.dumps(settings))
    return Interpreter([*_bwrap(config, is_root), *python_words], _ENVIRONMENT)


def check_sandbox(config: PythonTool) -> None:
    """Run a snippet that inspects the sandbox. Raises ValueError if the sandbox does not work or is incomplete."""
    if not hasattr(os, "pidfd_open"):
        raise ValueError("tools.python runs only on Linux; remove it from the settings")
    if config.packages is not None and not os.path.isdir(config.packages):
        raise ValueError(f"tools.python.packages: {config.packages!r} is not a folder")
    try:
        interpreter = start_interpreter(config)
        try:
            interpreter.wait_until_ready(_LOOK_S)
            output = interpreter.run(_LOOK, _LOOK_S, most_bytes=1 << 16).output.decode("utf-8", "replace").strip()
        finally:
            interpreter.kill()
    except (StartError, OSError) as error:
        output = str(error)
    if output != "isolated":
        last = (output.splitlines() or ["it exited without output"])[-1]
        raise ValueError(
            f"tools.python: bubblewrap cannot create a complete sandbox here ({last[-200:]}); {_what_helps()}"
        )


def _what_helps() -> str:
    """Return instructions for a machine without a working sandbox; they name the kernel settings that prevent it."""
    cures = [] if shutil.which("bwrap") else ["install bubblewrap (apt-get install bubblewrap, or conda-forge's)"]
    if not _is_root():
        for (name, value), cure in _IN_THE_WAY.items():
            file = _KERNEL_SETTINGS / name.replace(".", "/")
            if file.exists() and file.read_text().strip() == value:
                cures.append(f"{name} is {value} on this machine: {cure}")
    return "what helps: " + "; ".join([*cures, "allow the user or the container to create namespaces (docs/python.md)"])


def _is_root() -> bool:
    """Return True if the kernel treats this process as root, which it does not in a container with mapped user ids."""
    if os.geteuid() != 0:
        return False
    inside, outside, _ = Path("/proc/self/uid_map").read_text().split(maxsplit=2)
    return inside == outside == "0"


def _shown(config: PythonTool) -> list[str]:
    """Return the folders and files of the host that code in the sandbox may read."""
    own = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, sysconfig.get_path("stdlib"))]
    wanted = [*_SYSTEM, *own, *([os.path.realpath(config.packages)] if config.packages else [])]
    shown: list[str] = []
    for path in wanted:
        if os.path.exists(path) and not any(path == other or path.startswith(f"{other}/") for other in shown):
            shown.append(path)
    return shown


def _bwrap(config: PythonTool, is_root: bool) -> tuple[str, ...]:
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--hostname", "sandbox", "--cap-drop", "ALL"]
    command += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts", "cgroup-try")]
    # The guest needs these to set up the sandbox, and then drops them.
    capabilities = ["SYS_ADMIN", *(("SETUID", "SETGID") if is_root else ())]
    command += [word for name in capabilities for word in ("--cap-add", f"CAP_{name}")]
    # By default bubblewrap stays the namespace's first process, without the filter; it receives the signal that ends all
    # processes when the trainer dies. Under root this is safe, because the guest has another user id and cannot touch it.
    # Otherwise the guest could write to bubblewrap's memory, so the guest itself becomes the first process.
    command += [] if is_root else ["--as-pid-1", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    size = str(config.tmp_mib << 20)
    # Mounted first, since the folder of packages may be below /tmp.
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]
    for path in _shown(config):
        for parent in reversed(Path(path).parents[:-1]):  # bubblewrap would create parents with the host's permissions
            command += ["--perms", "0755", "--dir", str(parent)]
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dir", "/dev"]
    command += [word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    return (*command, "--remount-ro", "/", "--chdir", "/tmp", "--")


_numbers = itertools.count()


def _spare_uid() -> int:
    """Return an unused user id, different at each call and in each process of this machine."""
    return _FIRST_UID + (os.getpid() % (1 << 22) << 8) + next(_numbers) % (1 << 8)
