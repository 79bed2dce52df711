"""`marsrl join` and the trainer's end of it: real Ray, one machine, a node for every host; engines are our own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from held_port import held_port
from processes import actors

from marsrl.rollout.pool.addresses import address_towards, own_address, split_address
from marsrl.trainer.commands.cli import main

HEAD = """
import logging, sys
import numpy as np
logging.basicConfig(stream=sys.stdout, format="%(message)s")
from marsrl.rollout.config import RolloutConfig, VllmOptions
from marsrl.rollout.engines.protocol import DecodeRequest, Sampling
from marsrl.rollout.pool.build import make_pool
config = RolloutConfig(
    engine="local", engines=2, threads=1, object_store_mib=80, ray_address=f"here:{sys.argv[2]}", join_s=900
)
with make_pool("main", sys.argv[1], config, dtype="float32", max_model_len=128, own_host="127.0.0.1", silence_s=60) as pool:
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


class Lines(threading.Thread):
    """What a program prints, as it comes."""

    def __init__(self, *words: str, home: Path) -> None:
        super().__init__(daemon=True)
        environment = {**os.environ, "HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *words], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=_hear_ctrl_c,
        )  # fmt: skip
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, part: str, after: int = 0, seconds: float = 600) -> str:
        """The first line behind the first `after` with this in it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := next((line for line in self.lines[after:] if part in line), None):
                return found
            assert self.process.poll() is None or self.is_alive(), "\n".join(self.lines[-30:])
            time.sleep(0.1)
        raise AssertionError(f"no {part!r} in\n" + "\n".join(self.lines[-30:]))

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def _hear_ctrl_c() -> None:
    """Also where the tests run in a shell's background, whose children are born deaf to it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def programs(home: Path) -> Iterator[Callable[..., Lines]]:
    """Starts programs; none is left in the end."""
    started: list[Lines] = []

    def start(*words: str) -> Lines:
        started.append(Lines(*words, home=home))
        return started[-1]

    try:
        yield start
    finally:
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = psutil.Process(each.process.pid).children(recursive=True)
                each.process.terminate()
                _, left = psutil.wait_procs([*processes, psutil.Process(each.process.pid)], timeout=60)
                for process in left:
                    process.kill()


@pytest.mark.slow
def test_two_hosts_lend_their_engines_and_the_run_goes_on_without_one_until_a_third_lends_its_own(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    with programs(tmp_path) as start, held_port() as port:
        joins = ("-m", "marsrl.trainer.commands.cli", "join", f"127.0.0.1:{port}", "--wait", "600")
        first = start(*joins)  # before the head
        first.wait_for("waiting for the trainer's cluster at 127.0.0.1")
        head = start("-W", "ignore", "-c", HEAD, str(checkpoint("qwen3_moe")), str(port))
        first.wait_for("is part of the cluster")
        waiting = head.wait_for("no place for the engines of policy main: 2 engine slot(s) needed, ")
        assert f"`marsrl join 127.0.0.1:{port}`" in waiting
        second = start(*joins)
        head.say("play")
        alone = head.wait_for("tokens [[")
        # Ctrl-C at the second host leaves nothing of it; the other engine has all there is to do
        processes = psutil.Process(second.process.pid).children(recursive=True)
        assert actors(psutil.Process(second.process.pid))
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(300) == 130 and not psutil.wait_procs(processes, timeout=60)[1]
        seen = len(head.lines)
        head.say("play")
        head.wait_for("no host has a place for it: the run goes on without it until one has", seen)
        assert head.wait_for("tokens [[", seen) == alone  # seeds do not depend on the attempt, or on the host
        assert head.wait_for("restarts", seen) == "restarts 0 engines 1"
        third = start(*joins)
        third.wait_for("is part of the cluster")
        for _ in range(600):  # it is not looked for all the time
            time.sleep(0.5)
            seen = len(head.lines)
            head.say("play")
            assert head.wait_for("tokens [[", seen) == alone
            if (told := head.wait_for("restarts", seen)) != "restarts 0 engines 1":
                break
        assert told == "restarts 1 engines 2"
        # the trainer ends
        assert head.process.stdin is not None
        head.process.stdin.close()
        assert head.process.wait(300) == 0
        for host in (first, third):
            assert "has ended" in host.wait_for("has ended") and host.process.wait(300) == 0


def test_what_does_not_answer_and_what_is_no_token_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with held_port() as port:
            address = f"127.0.0.1:{port}"
            assert main(["join", address, "--wait", "0"]) == 1
        said = capsys.readouterr().err
        assert f"no cluster at {address} within --wait 0 s (no Ray listens there)" in said
        assert main(["join", address, "--token-file", str(tmp_path / "none")]) == 1
        assert (
            "which is no file with a token: copy ~/.ray/auth_token of trainer rank 0's host" in capsys.readouterr().err
        )
        os.environ["MARSRL_DEVICE"] = "cpu"
        assert main(["join", address, "--gpus", "0,1"]) == 2
        assert "--gpus is 0,1, and this host has 0 GPU(s)" in capsys.readouterr().err
        assert main(["join", ":1"]) == 2
        assert "':1' is no address" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)


def test_this_host_is_found_by_its_address() -> None:
    assert split_address("node0", 6379) == ("node0", 6379) and split_address("10.0.0.1:7", 6379) == ("10.0.0.1", 7)
    assert split_address("[fd00::2]:7", 6379) == ("fd00::2", 7) and split_address("fd00::2", 6379) == ("fd00::2", 6379)
    assert split_address("here", 6379) == ("here", 6379)
    assert address_towards("127.0.0.1") == "127.0.0.1" and address_towards("no-such-host.invalid") is None
    assert own_address("localhost") == "127.0.0.1"
    with pytest.raises(RuntimeError, match=r"sync.host is 192\.0\.2\.77, which is no address of this host"):
        own_address("192.0.2.77")
    os.environ["MASTER_ADDR"] = "127.0.0.3"  # of torchrun on one machine: no other host reaches that
    assert not own_address().startswith("127.0.0.3")
