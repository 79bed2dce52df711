"""A cluster in a box: hosts that are kernel namespaces on this machine, on a bridge that nothing else can reach.

    with Box(3) as box:
        process = box.hosts[0].start("torchrun trainer/main.py ...", log)
        box.hosts[2].cut_off(); box.hosts[2].reconnect()
        box.hosts[1].power_off()

    room            one process, which holds the bridge and the disk on SHARED; the disk acts as the cluster's file system
    host1, host2    one process each, the first of a PID namespace: own address 10.77.0.N, name, IPC, /tmp, /run, /dev/shm, HOME

All other files, including the checkout and its Python, are the files of this machine, read-only.

Nothing outlives the process that created the box, and no cleanup is needed: the kernel kills the holders with it
(PR_SET_PDEATHSIG), a host's processes with the host's first process, and interfaces and mounts with the last process of their
namespace. Process names are not used. Needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/mnt/cluster")  # /mnt exists on every Linux; inside the box another file system is mounted on it
_NET = "10.77.0"
_ENTER = ("--mount", "--uts", "--ipc", "--net", "--pid", "--wd")

# The script's last line never ends; meanwhile bash reaps the processes that Ray's daemons orphan.
_STAYS = "echo ready; while sleep 1000; do :; done"
_ROOM = """set -e
mount -t tmpfs -o size={mib}m,mode=755 tmpfs /mnt
mkdir {shared} /mnt/.kept
printf '%b' '{names}' >/mnt/.hosts
{keep}
ip link set lo up
ip link add br0 type bridge
ip link set br0 up
"""
_HOST = """set -e
hostname {name}
mount --bind /mnt/.hosts /etc/hosts
for own in /tmp /run /dev/shm; do mount -t tmpfs tmpfs $own; done
mkdir /tmp/home
{keep}
mount -o remount,bind,ro /
ip link set lo up
cd {root}
"""


class Box:
    """Hosts on one switch. All of them end when the `with` block is left, or when this process ends.

    shared_mib: size of the shared disk, which is in memory.
    """

    def __init__(self, num_hosts: int, *, shared_mib: int = 1024) -> None:
        """Raises RuntimeError if this machine allows no namespaces, FileNotFoundError if the tools are missing."""
        self.hosts: list[Host] = []
        # These paths may be below /tmp, which every host replaces by its own; _HOST mounts them again.
        self._kept = kept = sorted({str(ROOT), sys.prefix, sys.base_prefix})
        names = "127.0.0.1 localhost\\n" + "".join(f"{_NET}.{n} host{n}\\n" for n in range(1, num_hosts + 1))
        keep = [f"mkdir /mnt/.kept/{i}; mount --bind {path} /mnt/.kept/{i}" for i, path in enumerate(kept)]
        room = _ROOM.format(mib=shared_mib, shared=SHARED, names=names, keep="\n".join(keep))
        self._room = _Holder(["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"], room)
        try:
            for number in range(1, num_hosts + 1):
                self.hosts.append(Host(number, self._room, kept))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared(self) -> Path:
        """The shared folder, as this process sees it."""
        return self._room.root / SHARED.relative_to("/")

    def replace(self, number: int) -> Host:
        """Replace a host by a new one with the same name and address, but none of its state."""
        self.hosts[number - 1].power_off()
        self.hosts[number - 1] = Host(number, self._room, self._kept)
        return self.hosts[number - 1]

    def close(self) -> None:
        """End everything. May be called twice."""
        for host in self.hosts:
            host.holder.close()
        self._room.close()


class Host:
    """A host. name, address: as the other hosts see them."""

    def __init__(self, number: int, room: _Holder, kept: list[str]) -> None:
        self.name, self.address = f"host{number}", f"{_NET}.{number}"
        self._port, self._room = f"p{number}", room
        keep = [
            f"mkdir -p {path}; mount --bind /mnt/.kept/{i} {path}; mount -o remount,bind,ro {path}"
            for i, path in enumerate(kept)
        ]
        script = _HOST.format(name=self.name, keep="\n".join(keep), root=ROOT)
        # The room's mounts are copied, so all hosts share its disk.
        inside = [
            "nsenter",
            f"--target={room.pid}",
            "--mount",
        ]
        spaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.holder = _Holder([*inside, *spaces], script)
        veth = f"ip link add eth0 netns {self.holder.pid} type veth peer name {self._port} netns {room.pid}"
        _call(veth)
        for line in (f"ip addr add {self.address}/24 dev eth0", "ip link set eth0 up"):
            self.holder.call(line)
        for line in (f"ip link set {self._port} master br0", f"ip link set {self._port} up"):
            room.call(line)

    def start(self, command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command in the checkout on this host, and append its output to `log`.

        Signals to the returned process reach the command.
        """
        with open(log, "ab") as out:
            return subprocess.Popen(
                [*self.enter, "bash", "-c", f"exec {command}"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env={**self.environment, **environment}, start_new_session=True,
            )  # fmt: skip

    def cut_off(self) -> None:
        """Disconnect the network: no packet arrives, and no connection is closed."""
        self._room.call(f"ip link set {self._port} down")

    def reconnect(self) -> None:
        self._room.call(f"ip link set {self._port} up")

    def power_off(self) -> None:
        """Switch the host off. Its network goes first; otherwise the kernel would close its connections. May be called twice."""
        if self.holder.is_there:
            self._room.call(f"ip link del {self._port}")
            self.holder.close()

    @property
    def enter(self) -> list[str]:
        """Return the command prefix that runs a command on this host, in the checkout."""
        return ["nsenter", f"--target={self.holder.pid}", *_ENTER]

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the host's commands: this process's search paths, and no settings of the user or the tests."""
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PYTHONPATH")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {
            **kept, "PATH": path, "HOME": "/tmp/home", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip


class _Holder:
    """First process of new namespaces, after its setup script has run there. Dies with this process."""

    def __init__(self, spaces: list[str], script: str) -> None:
        words = ["setpriv", "--pdeathsig=KILL", *spaces, "bash", "-c", script + _STAYS]
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != "ready\n":
            self._process.kill()
            raise RuntimeError(f"{' '.join(spaces)} failed: {self._process.stderr.read().strip()}")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (self.pid,) = map(int, children.read_text().split())

    @property
    def root(self) -> Path:
        """The host's file systems, as this process sees them."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def call(self, command: str) -> None:
        _call(f"nsenter --target={self.pid} --net {command}")

    def close(self) -> None:
        """Kill the process, and return once all processes of its namespace are gone. May be called twice."""
        if self.is_there:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()


def _call(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
