"""`marsrl join`: makes this host a node of the Ray cluster of a trainer on another host, and offers it room for engines.

wait for the head -> `ray start --address HEAD --block` -> watch both; head ended: leave; node ended: join again

The node, with its engines, ends with this process, however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from marsrl.rollout.pool.addresses import address_towards
from marsrl.rollout.pool.ray_connection import ENGINE_SLOT
from marsrl.rollout.pool.ray_start import visible
from marsrl.rollout.pool.ray_token import show_token

_LOOK_S = 1.0
_ANSWER_S = 3.0  # timeout for the head's machine to answer
_SAY_S = 30.0  # interval between messages while waiting
_SHORT_LIFE_S, _SHORT_LIVES = 30.0, 3  # after this many nodes in a row that lived no longer, give up
_REFUSALS = 3  # this many refused connections in a row: the head is gone
_LEAVE_S = 10.0  # time for engines to end by themselves
_LOGS = "/tmp/ray/session_latest/logs"
_PDEATHSIG = 1  # PR_SET_PDEATHSIG of prctl


@dataclass(frozen=True, slots=True)
class Offer:
    """Resources of this host for engines. gpus: indices among those visible to this process; engines: slots on CPUs."""

    gpus: Sequence[int]
    engines: int

    def __str__(self) -> str:
        return f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else f"{self.engines} engine slot(s) on CPUs"


def offer_of_this_host(gpus: Sequence[int] | None, engines: int | None) -> Offer:
    """Offer the given GPUs (None: all); without GPUs, slots for engines on CPUs, 1 by default.

    Raises ValueError: an unknown GPU, or slots besides GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = tuple(range(num_gpus)) if gpus is None else tuple(gpus)
    if not set(chosen) <= set(range(num_gpus)):
        raise ValueError(
            f"--gpus is {','.join(map(str, chosen))}, but this host has {num_gpus} GPU(s); expected indices from 0"
        )
    if engines is not None and (engines < 1 or chosen):
        raise ValueError(
            f"--engines is {engines}; expected at least 1, and only on a host without GPUs; with GPUs use --gpus"
        )
    return Offer(chosen, 0 if chosen else engines or 1)


class JoinError(RuntimeError):
    """This host could not join the cluster, or has dropped out."""


def join(host: str, port: int, offer: Offer, *, wait_s: float, say: Callable[[str], None]) -> None:
    """Serve the cluster whose head is at host:port until it ends or this process is stopped.

    wait_s: time for the head to answer, at first and whenever it is silent.
    say: called with each line of progress.

    Raises:
        JoinError: no answer within wait_s, another version of Ray or Python, a wrong token, or a node that keeps ending.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the node is gone by then.
    """
    _, token = show_token()
    head, short_lives = _Head(host, port, wait_s, say), 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt
    while head.is_awaited():
        own, began = address_towards(host) or "127.0.0.1", time.monotonic()
        joined = (
            f"{socket.gethostname()} ({own}) has joined the cluster at {head.name} with {offer}; press Ctrl-C to leave"
        )
        with _started(head.name, own, offer) as (process, output):
            while not head.has_ended and (not head.is_there() or process.poll() is None):
                if joined and _is_up(output):
                    say(joined)
                    joined = ""
                time.sleep(_LOOK_S)
            last_output = " ".join(output.read_text(encoding="utf-8", errors="replace").split())[-500:]
            is_up, status = _is_up(output), process.poll()
        if head.has_ended:
            break
        if (
            not is_up and "timed out during startup" not in last_output
        ):  # Ray's own 30 s are too short for a busy machine
            raise JoinError(
                f"this host (Ray {ray.__version__}, Python {platform.python_version()}) could not join the cluster at "
                f"{head.name} ({last_output or 'no output from Ray'}); its token: {token}"
            )
        short_lives = short_lives + 1 if not is_up or time.monotonic() - began < _SHORT_LIFE_S else 0
        if short_lives == _SHORT_LIVES:
            raise JoinError(
                f"Ray's node of this host ended {short_lives} times in a row ({last_output}); see its logs in {_LOGS}"
            )
        say(f"Ray's node of this host has ended with status {status} (logs in {_LOGS}); joining again")
    say(f"the cluster at {head.name} has ended; {socket.gethostname()} leaves it")


class _Head:
    """Port of the trainer's Ray. has_ended: Ray listened there but no longer does."""

    def __init__(self, host: str, port: int, wait_s: float, say: Callable[[str], None]) -> None:
        self._address, self.name, self._wait_s, self._say = (host, port), f"{host}:{port}", wait_s, say
        self._answered, self._said = time.monotonic(), -math.inf
        self._was_there, self._num_refusals = False, 0

    @property
    def has_ended(self) -> bool:
        return self._was_there and self._num_refusals >= _REFUSALS

    def is_awaited(self) -> bool:
        """Wait until Ray listens there and return True; return False if it has ended."""
        while not self.has_ended:
            if self.is_there():
                return True
            time.sleep(_LOOK_S)
        return False

    def is_there(self) -> bool:
        """Return True if Ray listens there; JoinError if nothing has answered for wait_s."""
        now = time.monotonic()
        try:
            socket.create_connection(self._address, timeout=_ANSWER_S).close()
            self._answered, self._said, self._was_there, self._num_refusals = now, now, True, 0
            return True
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            why = "Ray does not listen there" if is_refused else str(error)
            self._num_refusals = self._num_refusals + 1 if is_refused else 0
        left = self._answered + self._wait_s - now
        if left <= 0:
            raise JoinError(
                f"no cluster at {self.name} within --wait {self._wait_s:g} s ({why}): start the trainer with "
                "rollout.ray_address=here, correct the address, or open the port"
            )
        if now - self._said >= _SAY_S:
            self._said = now
            self._say(f"waiting for the trainer's cluster at {self.name} ({why}), {left:.0f} s left of --wait")
        return False


def _is_up(output: Path) -> bool:
    return b"Ray runtime started" in output.read_bytes()


@contextlib.contextmanager
def _started(where: str, own: str, offer: Offer) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run a node of the cluster inside the block: `ray start --block`, and the file with its output.

    No process of the node remains afterwards.
    """
    words = [
        f"--address={where}",
        f"--node-ip-address={own}",
        f"--num-cpus={os.cpu_count()}",
        f"--num-gpus={len(offer.gpus)}",
    ]
    words += [f"--resources={json.dumps({ENGINE_SLOT: offer.engines})}"] if offer.engines else []
    # Any port: all nodes of a machine share Ray's default range.
    words += ["--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats", "--block"]
    with tempfile.TemporaryDirectory(prefix="marsrl-join-") as folder:
        output = Path(folder) / "said"
        with visible(offer.gpus), output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *words],
                env={"RAY_worker_niceness": "0", **os.environ},  # as for engines on the trainer's host
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        try:
            yield process, output
        finally:
            interrupts = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
            _end(process)
            for each, handler in interrupts.items():
                signal.signal(each, handler)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to `ray start`, which ends its node; kill what remains after _LEAVE_S, engines' processes too."""
    processes = [psutil.Process(process.pid)] if process.poll() is None else []
    for each in list(processes):
        processes += each.children(recursive=True)
    process.terminate()
    _, left = psutil.wait_procs(processes, timeout=_LEAVE_S)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, timeout=_LEAVE_S)
    process.wait()
