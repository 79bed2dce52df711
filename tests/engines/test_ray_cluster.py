"""Real Ray clusters with simulated GPUs: their tokens, the GPUs of engines, hosts that join and leave."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from documented_commands import run_by
from engine_cases import actors
from held_port import held_port

from marsrl.rollout.pool.addresses import address_towards, own_address, split_address

JOIN = """
import os, socket, sys
from marsrl.rollout.engines.refusals import RankHost
from marsrl.rollout.pool.ray_connection import RayCluster
try:
    cluster = RayCluster(address=sys.argv[1], timeout_s=float(sys.argv[2]), object_store_mib=80)
except RuntimeError as error:
    print(error)
    sys.exit()
here, there = socket.gethostname(), "elsewhere"
def tell(method, *words, **named):
    try:
        method(*words, **named)
        print("fine")
    except RuntimeError as error:
        print(error)
for hosts in ([RankHost(here, 8, 6)], [RankHost(here, 8, 7)], [RankHost(here, 8, 8), RankHost(there, 8, 8)]):
    tell(cluster.check_owners, hosts, is_shared=False)
for hosts in ([RankHost(here, 8, 2)], [RankHost(here, 8, 4)], [RankHost(there, 8, 2)]):
    tell(cluster.check_owners, hosts, is_shared=True)
for gpus, num, wait_s in ((1, 2, 120), (2, 1, 120), (2, 2, 1)):  # Ray releases what a check has held only after a while
    tell(cluster.await_place, "the engines", {"GPU": gpus}, num, wait_s)
"""
OWN = """
import os, signal, time, psutil, ray
from marsrl.rollout.pool.ray_connection import RayCluster
from marsrl.rollout.pool.ray_faults import check_head
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
cluster = RayCluster(address=None, timeout_s=60, object_store_mib=80, gpus=[2, 1])
assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6,7"

@ray.remote(num_cpus=0, num_gpus=1)
class Engine:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

engines = [Engine.remote(), Engine.remote()]
print(*sorted(ray.get([engine.gpu.remote() for engine in engines])))
for child in psutil.Process().children():  # only the raylet: its reaction to SIGTERM depends on which process dies first
    if child.name() == "raylet":
        child.terminate()
time.sleep(2)
os.killpg(0, signal.SIGTERM)
time.sleep(2)
check_head()
print(*got, *sorted(ray.get([engine.gpu.remote() for engine in engines])))
cluster.close()
"""


def printed(program: str, *words: str, **variables: str) -> list[str]:
    """Return the lines that a program prints. variables: environment variables in addition to this process's."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        start_new_session=True,  # as torchrun starts a rank
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


class Program:
    """A running program, and the file with its output."""

    def __init__(self, words: Sequence[str], out: Path, **variables: str) -> None:
        with open(out, "wb") as console:
            # Restore SIGINT, which children of a shell's background job inherit as ignored.
            self.process = subprocess.Popen(
                [sys.executable, *words], env={**os.environ, **variables}, text=True, stdin=subprocess.PIPE,
                stdout=console, stderr=subprocess.STDOUT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )  # fmt: skip
        self.out = out

    def lines(self) -> list[str]:
        return self.out.read_text().split("\n")[:-1]

    def wait_for(self, part: str, after: int = 0, seconds: float = 600) -> str:
        """Return the first line that contains `part`, after the first `after` lines."""
        end = time.monotonic() + seconds
        while True:
            has_ended = self.process.poll() is not None
            if found := next((line for line in self.lines()[after:] if part in line), None):
                return found
            assert not has_ended and time.monotonic() < end, f"no {part!r} in\n" + "\n".join(self.lines()[-30:])
            time.sleep(0.1)

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            _, left = psutil.wait_procs([*processes, psutil.Process(self.process.pid)], timeout=60)
            for process in left:
                process.kill()


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, Path]]:
    """Run `ray start --head` with a token and two simulated GPUs; yield the cluster's address and HOME."""
    # pytest's tmp_path is too long for the paths of Ray's sockets.
    with tempfile.TemporaryDirectory() as named, held_port() as port:
        folder = Path(named)
        (folder / "home").mkdir()
        (command,) = run_by("test_joining_a_cluster_needs_its_token")
        words = ["-m", "ray.scripts.scripts", *command.split()[1:]]
        subprocess.run([sys.executable, *words], env={**os.environ, "HOME": str(folder / "home")}, check=True)
        words = ["-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}/t"]
        words += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=2"]
        # The ports of workers must not be the head's.
        words += ["--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
        ray = Program(words, folder / "console", HOME=str(folder / "home"), CUDA_VISIBLE_DEVICES="6,7")
        try:
            ray.wait_for("Ray runtime started")
            yield f"127.0.0.1:{port}", folder / "home"
        finally:
            ray.end()


@pytest.mark.slow
def test_joining_a_cluster_needs_its_token(head: tuple[str, Path], tmp_path: Path) -> None:
    address, home = head
    without = printed(JOIN, address, "4", HOME=str(home))
    assert f"rollout.ray_address is {address}, but joining a Ray cluster there failed" in without[0]
    assert without[0].endswith("set RAY_AUTH_MODE=token and copy its ~/.ray/auth_token to this host")
    lacks = printed(JOIN, address, "4", HOME=str(tmp_path), RAY_AUTH_MODE="token")
    assert "no authentication token was found" in lacks[0]

    lines = printed(JOIN, address, "300", HOME=str(home), RAY_AUTH_MODE="token")
    here, cluster = socket.gethostname(), f"the Ray cluster at rollout.ray_address={address}"
    # Engines have their own GPUs, so Ray must not count the ranks' GPUs on any host.
    assert lines[0] == "fine"
    assert lines[1].startswith(f"{cluster} would give engines GPUs of the trainer's ranks")
    assert lines[1].endswith(f"{here}: Ray counts 2 GPU(s), expected CUDA_VISIBLE_DEVICES=7")
    assert lines[2].endswith(f"{here}: Ray counts 2 GPU(s), expected CUDA_VISIBLE_DEVICES=")
    # Colocated engines use the ranks' GPUs and no others.
    assert lines[3] == "fine"
    assert lines[4].endswith(f"{here}: Ray counts 2 GPU(s), expected CUDA_VISIBLE_DEVICES=0,1,2,3")
    assert lines[5].endswith(f"CUDA_VISIBLE_DEVICES=0,1; {here}: Ray counts 2 GPU(s), but the host has no trainer rank")
    # The cluster has room for the engines.
    assert lines[6:8] == ["fine"] * 2
    assert lines[8].startswith(
        "no room for the engines: 4 GPU(s) needed, 2 on one host for each, but the Ray cluster at "
    )
    assert f"has 2: {here} 2 (" in lines[8] and lines[8].endswith("on more hosts within rollout.join_s")


@pytest.mark.slow
def test_engines_started_here_see_their_gpus_and_survive_sigterm(tmp_path: Path) -> None:
    assert printed(OWN, CUDA_VISIBLE_DEVICES="5,6,7", HOME=str(tmp_path)) == ["6 7", "SIGTERM 6 7"]


HEAD = """
import logging, sys
import numpy as np
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from marsrl.rollout.config import RolloutConfig, VllmOptions
from marsrl.rollout.engines.protocol import DecodeRequest, EngineSpec, Sampling
from marsrl.rollout.pool.build import make_pool
config = RolloutConfig(
    engine="local", engines=2, threads=1, object_store_mib=80, ray_address=f"here:{sys.argv[2]}", join_s=900
)
spec = EngineSpec("local", sys.argv[1], "float32", 128)
with make_pool("main", spec, config, own_host="127.0.0.1", silence_s=60) as pool:
    prompt = np.arange(20, dtype=np.int32)
    asks = [DecodeRequest(f"{i}", prompt, 40, Sampling(), seed=i, affinity=f"{i}") for i in range(8)]
    for word in sys.stdin:
        pool.submit(asks, version=0, at_once=True)
        results = []
        while pool.num_under_way:
            results += pool.collect(0.2)
        results.sort(key=lambda result: result.uid)
        print("tokens", [result.token_ids.tolist() for result in results], flush=True)
        print("restarts", pool.take_faults().engine_restarts, "engines", pool.num_engines, flush=True)
"""


@pytest.mark.slow
def test_a_run_goes_on_without_a_host_until_another_joins(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    numbers = itertools.count()
    with contextlib.ExitStack() as programs, held_port() as port:

        def start(*words: str, **variables: str) -> Program:
            out = tmp_path / f"{next(numbers)}.log"
            program = Program(words, out, HOME=str(tmp_path), PYTHONUNBUFFERED="1", RAY_AUTH_MODE="token", **variables)
            programs.callback(program.end)
            return program

        def join() -> Program:
            """Join a host, with free ports, because all hosts share this machine.

            The host waits 20 s for a lost head, instead of 60 s.
            """
            words = (
                f"--address=127.0.0.1:{port}",
                "--block",
                "--num-cpus=1",
                "--min-worker-port=0",
                "--max-worker-port=0",
            )
            while True:
                host = start("-m", "ray.scripts.scripts", "start", *words, RAY_gcs_rpc_server_reconnect_timeout_s="20")
                with contextlib.suppress(AssertionError):
                    host.wait_for("Ray runtime started")
                    return host
                # Ray's constant 30 s are too short on a busy machine.
                assert "timed out during startup" in host.out.read_text(), host.out.read_text()

        head = start("-W", "ignore", "-c", HEAD, str(checkpoint("qwen3_moe")), str(port))
        waiting = head.wait_for("no room for the engines of policy main: 2 CPU(s) needed, ")
        assert f"`ray start --address=127.0.0.1:{port} --block`" in waiting
        first, second = join(), join()
        head.say("play")
        alone = head.wait_for("tokens [[")
        # Ctrl-C on the second host leaves nothing behind; the other engine takes over its work.
        processes = psutil.Process(second.process.pid).children(recursive=True)
        assert actors(psutil.Process(second.process.pid))
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(300) and not psutil.wait_procs(processes, timeout=60)[1]
        seen = len(head.lines())
        head.say("play")
        head.wait_for("no host has room for it; the run continues without it until one has", seen)
        assert head.wait_for("tokens [[", seen) == alone  # seeds do not depend on the attempt or the host
        assert head.wait_for("restarts", seen) == "restarts 0 engines 1"
        third = join()
        for _ in range(600):  # Ray checks for a lost host only now and then
            time.sleep(0.5)
            seen = len(head.lines())
            head.say("play")
            assert head.wait_for("tokens [[", seen) == alone
            if (status := head.wait_for("restarts", seen)) != "restarts 0 engines 1":
                break
        assert status == "restarts 1 engines 2"
        # The trainer ends, and the hosts leave.
        assert head.process.stdin is not None
        head.process.stdin.close()
        assert head.process.wait(300) == 0
        for host in (first, third):
            host.process.wait(300)


def test_this_host_is_found_by_its_address() -> None:
    assert split_address("node0", 6379) == ("node0", 6379) and split_address("10.0.0.1:7", 6379) == ("10.0.0.1", 7)
    assert split_address("[fd00::2]:7", 6379) == ("fd00::2", 7) and split_address("fd00::2", 6379) == ("fd00::2", 6379)
    for wrong in (":1", "here:65536", "here:0"):
        with pytest.raises(ValueError, match=f"'{wrong}' is not an address"):
            split_address(wrong, 6379)
    assert split_address("here", 6379) == ("here", 6379) == split_address("ray://here:6379", 1)
    assert address_towards("127.0.0.1") == "127.0.0.1" and address_towards("no-such-host.invalid") is None
    assert own_address("localhost") == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"sync.host is 192\.0\.2\.77, which is not an address of this host"):
        own_address("192.0.2.77")
    # MASTER_ADDR may be a loopback address of torchrun, which other hosts cannot reach, or an address of another host.
    for other in ("127.0.0.3", "192.0.2.77"):
        os.environ["MASTER_ADDR"] = other
        assert own_address() != other and address_towards("192.0.2.1") in (None, own_address())
