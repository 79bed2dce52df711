"""Joining a Ray cluster that demands a token, and what GPUs engines are given, by real Ray: it counts GPUs that are not there."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from held_port import held_port

pytestmark = pytest.mark.slow

JOIN = """
import os, socket, sys
from marsrl.rollout.engines.refusals import RankHost
from marsrl.rollout.pool.ray_token import show_token
show_token()  # before ray is imported
from marsrl.rollout.pool.ray_connection import RayCluster
try:
    cluster = RayCluster(address=sys.argv[1], timeout_s=float(sys.argv[2]), object_store_mib=80)
except RuntimeError as error:
    print(error)
    os._exit(0)  # ray.init still tries, in its thread
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
for gpus, num, wait_s in ((1, 2, 120), (2, 1, 120), (2, 2, 1)):  # Ray gives back what a check has held in its own time
    tell(cluster.await_place, "the engines", {"GPU": gpus}, num, wait_s)
"""
START = """
import os, ray
from marsrl.rollout.pool.ray_connection import RayCluster
cluster = RayCluster(address=None, timeout_s=60, object_store_mib=80, gpus=[2, 1])
assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6,7"

@ray.remote(num_cpus=0, num_gpus=1)
class Engine:
    def gpu(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

engines = [Engine.remote(), Engine.remote()]
print(*sorted(ray.get([engine.gpu.remote() for engine in engines])))
cluster.close()
"""
STOP = """
import os, signal, time, psutil, ray
from marsrl.rollout.pool.ray_connection import RayCluster
from marsrl.rollout.pool.ray_faults import check_head
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
cluster = RayCluster(address=None, timeout_s=60, object_store_mib=80)

@ray.remote(num_cpus=0)
class Engine:
    def answer(self):
        return "decodes"

engine = Engine.remote()
ray.get(engine.answer.remote())
for child in psutil.Process().children():  # the raylet alone: its answer to SIGTERM depends on who dies first
    if child.name() == "raylet":
        child.terminate()
time.sleep(2)
os.killpg(0, signal.SIGTERM)
time.sleep(2)
check_head()
print(*got, ray.get(engine.answer.remote()))
cluster.close()
"""


def told(program: str, *words: str, **variables: str) -> list[str]:
    """Lines that a program prints; variables: beside this process's."""
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


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A cluster with a token, as `ray start --head` makes it, that counts two GPUs: its address, and its user's home."""
    folder = tmp_path_factory.mktemp("r")
    (folder / "home" / ".ray").mkdir(parents=True)
    (folder / "home" / ".ray" / "auth_token").write_text(secrets.token_hex(32))
    with held_port() as port:
        yield from started(folder, port)


def started(folder: Path, port: int) -> Iterator[tuple[str, Path]]:
    """The cluster of `head`, and its end."""
    words = [f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=1", "--num-gpus=2", f"--temp-dir={folder}/t"]
    # the ports of workers must not be the head's
    words += ["--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"]
    starts = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
    environment = {**os.environ, "HOME": str(folder / "home"), "CUDA_VISIBLE_DEVICES": "6,7"}
    ray = subprocess.Popen(starts, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ray.stdout is not None
    for line in ray.stdout:
        if "Ray runtime started" in line:
            break
    try:
        assert ray.poll() is None
        yield f"127.0.0.1:{port}", folder / "home"
    finally:
        processes = [*psutil.Process(ray.pid).children(recursive=True), psutil.Process(ray.pid)]
        ray.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(processes, timeout=120)
        for process in left:
            process.kill()


def test_a_cluster_is_joined_with_its_token_or_the_token_is_named(head: tuple[str, Path], tmp_path: Path) -> None:
    address, home = head
    without = told(JOIN, address, "4", HOME=str(tmp_path))
    assert f"rollout.ray_address is {address}, but no Ray cluster could be joined there" in without[0]
    assert (
        f"its token: this host has none ({tmp_path}/.ray/auth_token), and a cluster may demand it: copy" in without[0]
    )
    off = told(JOIN, address, "4", HOME=str(home), RAY_AUTH_MODE="disabled")
    assert off[0].endswith("RAY_AUTH_MODE=disabled shows none, and a cluster may demand it: set RAY_AUTH_MODE=token")

    said = told(JOIN, address, "300", HOME=str(home))  # found in ~/.ray without a word from the user
    here, cluster = socket.gethostname(), f"the Ray cluster at rollout.ray_address={address}"
    # engines have GPUs of their own: what ranks of any host hold is not counted
    assert said[0] == "fine"
    assert said[1].startswith(f"{cluster} would give engines what the trainer uses")
    assert said[1].endswith(f"{here}: 2 counted, 7 trainer rank(s) on the first: CUDA_VISIBLE_DEVICES=7")
    assert said[2].endswith(f"{here}: 2 counted, 8 trainer rank(s) on the first: --num-gpus 0, or no Ray there at all")
    # colocated: it counts the ranks' GPUs, and no others
    assert said[3] == "fine"
    assert said[4].endswith(f"{here}: 2 counted, 4 trainer rank(s) on the first: CUDA_VISIBLE_DEVICES=0,1,2,3")
    assert said[5].endswith(f"CUDA_VISIBLE_DEVICES=0,1; {here}: 2 counted, and no trainer rank")
    # and there are enough of them
    assert said[6:8] == ["fine"] * 2
    assert said[8].startswith(
        "no place for the engines: 4 GPU(s) needed, 2 of one host for each, and the Ray cluster at "
    )
    assert f"has 2: {here} 2 (" in said[8] and said[8].endswith("on more hosts within rollout.join_s")


def test_engines_of_a_cluster_started_here_see_the_gpus_that_they_are_given(tmp_path: Path) -> None:
    assert told(START, CUDA_VISIBLE_DEVICES="5,6,7", HOME=str(tmp_path)) == ["6 7"]


def test_a_sigterm_to_all_processes_of_a_rank_leaves_ray_to_end_the_step(tmp_path: Path) -> None:
    assert told(STOP, HOME=str(tmp_path)) == ["SIGTERM decodes"]
