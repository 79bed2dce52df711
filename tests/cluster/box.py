"""A cluster in a box: hosts that are namespaces of this machine's kernel, on a bridge that nothing else can reach.

    with Box(3) as box:
        process = box.hosts[0].start("torchrun trainer/main.py ...", log)
        box.hosts[2].cut_off(); box.hosts[2].reconnect()
        box.hosts[1].power_off()

    room            one process: it holds the bridge, and the disk on SHARED that stands for the cluster's file system
    host1, host2    one first process each, of a PID namespace: network 10.77.0.N, host name, IPC, /tmp, /run, /dev/shm, HOME

What else a host sees is this machine's, and read-only: the checkout and its Python among it.

Nothing outlives the process that made the box, however that ends, and nothing has to be cleaned up: the holders are killed
with it by the kernel (PR_SET_PDEATHSIG), the processes of a host with its first one, interfaces and mounts with the last
process of their namespace. Names of processes play no part. Needs root, iproute2 and util-linux; Linux alone.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/mnt/cluster")  # /mnt is there on every Linux; another file system is mounted on it in the room
_NET = "10.77.0"
_ENTER = ("--mount", "--uts", "--ipc", "--net", "--pid", "--wd")

# The last line stays: sleep is ended by nobody, and bash reaps what Ray's daemons leave to the first process.
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
    """Hosts on one switch. Leaving the body, or any other end of this process, ends them all.

    shared_mib: of the shared disk, in memory.
    """

    def __init__(self, num_hosts: int, *, shared_mib: int = 1024) -> None:
        """Raises RuntimeError where this machine lets no namespaces be made, FileNotFoundError where it has not the tools."""
        self.hosts: list[Host] = []
        # A host has a /tmp of its own, under which these may lie.
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
        """The shared folder as this process reaches it."""
        return self._room.root / SHARED.relative_to("/")

    def replace(self, number: int) -> Host:
        """A new machine in the place of one: its name and address, and nothing of what it had."""
        self.hosts[number - 1].power_off()
        self.hosts[number - 1] = Host(number, self._room, self._kept)
        return self.hosts[number - 1]

    def close(self) -> None:
        """End everything; may be called twice."""
        for host in self.hosts:
            host.holder.close()
        self._room.close()


class Host:
    """One of the hosts: `name` and `address` as the others know it."""

    def __init__(self, number: int, room: _Holder, kept: list[str]) -> None:
        self.name, self.address = f"host{number}", f"{_NET}.{number}"
        self._port, self._room = f"p{number}", room
        keep = [
            f"mkdir -p {path}; mount --bind /mnt/.kept/{i} {path}; mount -o remount,bind,ro {path}"
            for i, path in enumerate(kept)
        ]
        script = _HOST.format(name=self.name, keep="\n".join(keep), root=ROOT)
        inside = ["nsenter", f"--target={room.pid}", "--mount"]  # its mounts are copied: the shared disk is one
        spaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.holder = _Holder([*inside, *spaces], script)
        veth = f"ip link add eth0 netns {self.holder.pid} type veth peer name {self._port} netns {room.pid}"
        _call(veth)
        for line in (f"ip addr add {self.address}/24 dev eth0", "ip link set eth0 up"):
            self.holder.call(line)
        for line in (f"ip link set {self._port} master br0", f"ip link set {self._port} up"):
            room.call(line)

    def start(self, command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command of the checkout there, its output appended to `log`. Its signals are this process's child's."""
        with open(log, "ab") as out:
            return subprocess.Popen(
                [*self.enter, "bash", "-c", f"exec {command}"], stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, env={**self.environment, **environment}, start_new_session=True,
            )  # fmt: skip

    def cut_off(self) -> None:
        """Pull the network cable: nothing arrives, and nobody is told."""
        self._room.call(f"ip link set {self._port} down")

    def reconnect(self) -> None:
        self._room.call(f"ip link set {self._port} up")

    def power_off(self) -> None:
        """Gone without a word: the cable first, or the kernel would close its connections as it dies. May be called twice."""
        if self.holder.is_there:
            self._room.call(f"ip link del {self._port}")
            self.holder.close()

    @property
    def enter(self) -> list[str]:
        """The words before a command that runs it there, in the checkout."""
        return ["nsenter", f"--target={self.holder.pid}", *_ENTER]

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its commands: this process's paths to programs, and nothing of its user or of its tests."""
        kept = {name: value for name, value in os.environ.items() if name in ("LANG", "PYTHONPATH")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {
            **kept, "PATH": path, "HOME": "/tmp/home", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip


class _Holder:
    """The first process of new namespaces, after its script has run there; it dies with this process."""

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
        """Its file systems as this process reaches them."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def call(self, command: str) -> None:
        _call(f"nsenter --target={self.pid} --net {command}")

    def close(self) -> None:
        """Returns when all of its processes are gone; may be called twice."""
        if self.is_there:
            os.kill(self.pid, signal.SIGKILL)
            self._process.wait()


def _call(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
