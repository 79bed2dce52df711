"""Starts a sandbox's interpreter, isolated from the rest of the machine.

WANTED lists the parts of a complete sandbox. Kernel, container and user decide which are available, and no version number tells:
each way is tried, best first, with a snippet that inspects its surroundings (_LOOK), and the first that lacks nothing is taken:

    bwrap    bubblewrap: its own root with the system read-only and a small /tmp, and namespaces for the rest
    plain    a process with limits and a seccomp filter, which sees the machine's files, processes and network

As root both start without a user namespace, and the guest then switches to an unused user id. In a user namespace the kernel
would still treat it as root, who may write settings in /proc/sys and is exempt from the limit on processes. Other users get a
user namespace.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from marsrl.rollout.tools.config import PythonTool
from marsrl.rollout.tools.python.cgroup import make_cgroup
from marsrl.rollout.tools.python.interpreter import Interpreter, StartError
from marsrl.rollout.tools.python.seccomp import seccomp_filter

WANTED = {
    "pid": "a pid namespace of its own",
    "mnt": "a mount namespace with a root of its own",
    "net": "a network namespace of its own",
    "ipc": "an IPC namespace of its own",
    "user": "a user of its own",
    "seccomp": "a seccomp filter",
    "capabilities": "no capabilities",
    "processes": "a limit on its processes",
    "kernel": "a kernel whose settings it cannot write",
}
_TMP_INODES = 4096
_FILES = 128  # open files of a process
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FIRST_UID = 1 << 30  # unused user ids: no system assigns these by default
_LOOK_S = 20.0
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # a thread counts as a process
    "OPENBLAS_NUM_THREADS": "1",
}
_KERNEL_SETTINGS = Path("/proc/sys")
# Kernel settings that deny user namespaces to ordinary users, and the remedies.
_IN_THE_WAY = {
    ("kernel.apparmor_restrict_unprivileged_userns", "1"): (
        "AppArmor takes all rights away in them, as Ubuntu has it from 23.10 on; as root, `sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0`, or a profile for bubblewrap alone (docs/python.md)"
    ),
    ("kernel.unprivileged_userns_clone", "0"): "as root, `sysctl -w kernel.unprivileged_userns_clone=1`",
    ("user.max_user_namespaces", "0"): "as root, `sysctl -w user.max_user_namespaces=15000`",
}
# Run by each way before it is taken: reports what is visible and possible from inside.
_LOOK = """
import fractions, json, os  # fractions: a module that it has not yet loaded
seen = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "mnt", "net", "ipc", "user")}
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines())
seen |= {"uid": os.getuid(), "root": list(os.stat("/"))[1:3], "seccomp": status.get("Seccomp") == "2"}
seen |= {"capabilities": int(status["CapEff"], 16), "passwords": os.path.exists("/etc/passwd"), "children": 0}
seen["kernel"] = not os.access("/proc/sys/kernel/core_pattern", os.W_OK)  # which says what the kernel runs, as root
hold, release = os.pipe()
try:
    while seen["children"] < %d:
        if not os.fork():
            os.close(release)
            os.read(hold, 1)
            os._exit(0)
        seen["children"] += 1
except OSError:
    pass
os.close(release)
print(json.dumps(seen))
"""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start an interpreter.

    prefix: the command that runs another in isolation; empty for a plain process. is_root: the guest switches to an unused user
    id.
    """

    name: str
    prefix: tuple[str, ...]
    is_root: bool

    def start(self, config: PythonTool, cgroups: Path | None = None) -> Interpreter:
        """Start an interpreter, in its own cgroup below `cgroups`, if there is such a place; it may not be ready yet.

        OSError: there is no such command, or no process or cgroup can be created.
        """
        limits = {
            "RLIMIT_AS": config.memory_mib << 20,
            "RLIMIT_CPU": config.cpu_s,
            "RLIMIT_NPROC": config.processes,
            "RLIMIT_FSIZE": config.tmp_mib << 20,
            "RLIMIT_NOFILE": _FILES,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_SIGPENDING": 64,
        }
        settings = {
            "uid": _spare_uid() if self.is_root else 0,
            "tmp_inodes": _TMP_INODES if self.prefix else 0,
            "limits": limits,
            "filter": (seccomp_filter() or b"").hex(),
            "packages": [str(Path(config.packages).resolve())] if config.packages else [],
            "preload": config.preload,
        }
        guest = Path(__file__).with_name("guest.py").read_text(encoding="utf-8")
        # outside of any virtual environment
        python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
        command = [*self.prefix, python, "-I", "-S", "-B", "-X", "utf8", "-c", guest, json.dumps(settings)]
        return Interpreter(command, _ENVIRONMENT, make_cgroup(cgroups, config) if cgroups is not None else None)


def choose_launcher(config: PythonTool) -> tuple[Launcher, list[str]]:
    """The best way that this machine allows, and descriptions of the parts of WANTED that it lacks.

    ValueError: a part is missing under tools.python.strict, or nothing can be started at all.
    """
    if not hasattr(os, "pidfd_open"):
        raise ValueError("tools.python runs on Linux only; leave it out here")
    if config.packages is not None and not os.path.isdir(config.packages):
        raise ValueError(f"tools.python.packages: {config.packages!r} is no folder")
    best: tuple[Launcher, list[str]] | None = None
    tried: list[str] = []
    for launcher in launchers(config):
        try:
            missing = look(launcher, config)
        except (StartError, OSError) as error:
            tried.append(f"{launcher.name} cannot be had ({error})")
            continue
        if best is None or len(missing) < len(best[1]):
            best = launcher, missing
        if not missing:
            return best
        tried.append(f"{launcher.name} lacks {', '.join(missing)}")
    reasons = "; ".join(tried)
    if best is None:
        raise ValueError(f"tools.python: no interpreter can be started: {reasons}{_closed_to_others()}")
    if config.strict:
        raise ValueError(
            f"tools.python.strict=true, and this machine has no whole sandbox: {reasons}; {how_to_have_one()}; or take what "
            "there is: tools.python.strict=false"
        )
    return best


def how_to_have_one() -> str:
    """Instructions for a machine without a complete sandbox; names the kernel settings responsible."""
    cures = [] if shutil.which("bwrap") else ["install bubblewrap (apt-get install bubblewrap, or conda-forge's)"]
    if False in _users():
        for (name, value), cure in _IN_THE_WAY.items():
            file = _KERNEL_SETTINGS / name.replace(".", "/")
            if file.exists() and file.read_text().strip() == value:
                cures.append(f"{name} is {value} on this machine: {cure}")
    return "what helps: " + "; ".join([*cures, "let the user or the container make namespaces (docs/python.md)"])


def launchers(config: PythonTool) -> Iterator[Launcher]:
    """All possible ways, best first."""
    for name in ("bwrap", "plain"):
        for is_root in _users():
            prefix = _bwrap(config, is_root) if name == "bwrap" else ()
            yield Launcher(f"{name} as root" if is_root else name, prefix, is_root)


def _users() -> tuple[bool, ...]:
    """Values of is_root to try, in order. The kernel does not treat root of a container with mapped user ids as root."""
    if os.geteuid() != 0:
        return (False,)
    inside, outside, _ = Path("/proc/self/uid_map").read_text().split(maxsplit=2)
    return (True,) if inside == outside == "0" else (True, False)


def look(launcher: Launcher, config: PythonTool) -> list[str]:
    """Descriptions of the parts of WANTED that a way lacks, found by running a snippet in it (StartError, OSError: in vain)."""
    interpreter = launcher.start(config)
    try:
        interpreter.wait_until_ready(_LOOK_S)
        ending = interpreter.run(_LOOK % (config.processes + 8), _LOOK_S, most_bytes=1 << 16)
    finally:
        interpreter.kill()
    try:
        seen = json.loads(ending.output)
    except ValueError:
        text = ending.output.decode("utf-8", "replace").strip()
        raise StartError(f"it does not run: {text[-200:] or ending.status}") from None
    return [WANTED[name] for name in WANTED if not _has(name, seen, config)]


def _has(name: str, seen: Mapping[str, object], config: PythonTool) -> bool:
    if name in ("pid", "net", "ipc"):
        return seen[name] != os.readlink(f"/proc/self/ns/{name}")
    if name == "mnt":
        root = os.stat("/")
        has_root = seen["root"] != [root.st_ino, root.st_dev] and not seen["passwords"]
        return has_root and seen["mnt"] != os.readlink("/proc/self/ns/mnt")
    if name == "user":
        return seen["user"] != os.readlink("/proc/self/ns/user") or seen["uid"] not in (0, os.geteuid())
    if name == "processes":
        return int(str(seen["children"])) < config.processes
    return bool(seen[name]) is (name != "capabilities")


def _closed_to_others() -> str:
    """The folder that prevents other users, such as the guest of a plain process under root, from running this Python; "" if
    none."""
    library = Path(os.path.realpath(sysconfig.get_path("stdlib")))
    closed = [each for each in (library, *library.parents) if not each.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return ""
    return (
        f"; this Python lies in {closed[-1]}, which is closed to other users, and code of a model runs as another one: install "
        f"with a Python that all can read (/usr/bin/python3), or chmod o+x {closed[-1]}"
    )


def _shown(config: PythonTool) -> list[str]:
    """Folders and files of the host that code in the sandbox may read."""
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
    capabilities = ["SYS_ADMIN", *(("SETUID", "SETGID") if is_root else ())]  # which the guest gives up
    command += [word for name in capabilities for word in ("--cap-add", f"CAP_{name}")]
    # By default the namespace's first process is bubblewrap's own, without the filter. Under root it has another user id than
    # the guest, which cannot touch it, and it alone receives the signal that ends all when the trainer dies. Otherwise the
    # guest could write its memory, and must be the first process itself.
    command += [] if is_root else ["--as-pid-1", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    size = str(config.tmp_mib << 20)
    command += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp"]  # first: packages may lie below
    for path in _shown(config):
        for parent in reversed(Path(path).parents[:-1]):  # it would create them with the host's permissions
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
    """An unused user id, different at each call and from other processes' on this machine."""
    return _FIRST_UID + (os.getpid() % (1 << 22) << 8) + next(_numbers) % (1 << 8)
