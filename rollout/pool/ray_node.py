"""`marsrl join`: this host's engines for a trainer on another one, as a node of the Ray cluster that its rank 0 started.

    wait for the head -> start a node -> watch the head and the node -> the head has ended: leave; the node has: join again

The node ends with this process, however that ends; engines that run on it end with the node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import psutil
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams

from marsrl.rollout.error_lines import first_line
from marsrl.rollout.pool.addresses import address_towards
from marsrl.rollout.pool.ray_connection import ENGINE_SLOT, use_token
from marsrl.rollout.pool.ray_start import only_what_is_needed, patiently, visible

_LOOK_S = 1.0
_ANSWER_S = 3.0  # for which the head's machine has to answer
_SAY_S = 30.0  # between two words of one who waits
_REFUSALS = 3  # in a row: nobody listens on the head's port any more
_SHORT_LIFE_S = 30.0  # of a node; after _SHORT_LIVES of these in a row there is no sense in another
_SHORT_LIVES = 3
_SLOW_STARTS = 3
_LEAVE_S = 10.0  # that engines get to end by themselves

Head = Literal["there", "refuses", "silent"]


@dataclass(frozen=True, slots=True)
class Offer:
    """The part of this host that is for engines. gpus: indices of those that this process sees; engines: slots on CPUs."""

    gpus: Sequence[int]
    engines: int

    def __str__(self) -> str:
        return f"GPU {', '.join(map(str, self.gpus))}" if self.gpus else f"{self.engines} engine slot(s) on CPUs"


def offer_of_this_host(gpus: Sequence[int] | None, engines: int | None) -> Offer:
    """All GPUs (None), or those; where there is none, slots for engines on CPUs, 1 by default.

    Raises:
        ValueError: a GPU that is not here, or slots beside GPUs.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = tuple(range(num_gpus)) if gpus is None else tuple(gpus)
    if len(set(chosen)) < len(chosen) or any(not 0 <= gpu < num_gpus for gpu in chosen):
        raise ValueError(
            f"--gpus is {','.join(map(str, chosen))}, and this host has {num_gpus} GPU(s), numbered from 0"
        )
    if engines is not None and (engines < 1 or chosen):
        why = (
            "expected at least 1"
            if engines < 1
            else f"and engines here are counted by GPUs ({len(chosen)}): use --gpus"
        )
        raise ValueError(f"--engines is {engines}, {why}")
    return Offer(chosen, 0 if chosen else engines or 1)


class JoinError(RuntimeError):
    """This host could not become part of the cluster, or is not any more."""


class _SlowStart(JoinError):
    """Ray waits 30 s for its raylet, which nothing sets: too short for a busy machine."""


def join(
    host: str, port: int, offer: Offer, *, token_file: str | None, wait_s: float, say: Callable[[str], None]
) -> None:
    """Serve the cluster whose head is at host:port until it ends, or this process is told to.

    Args:
        wait_s: for the head to be there, at first and whenever it is silent.
        say: told what happens, a line each.

    Raises:
        JoinError: nobody there within wait_s, another Ray or Python, a wrong token, or a node that dies again and again.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing of the node is left.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")  # as for engines beside the trainer
    logging.getLogger("ray").setLevel(logging.ERROR)
    token = _token(token_file)
    where, short_lives, slow_starts = f"{host}:{port}", 0, 0
    signal.signal(signal.SIGTERM, _interrupt)
    while True:
        _await_head(host, port, wait_s, say)
        own = address_towards(host) or "127.0.0.1"
        began = time.monotonic()
        try:
            with _node(where, own, offer, token) as node:
                say(f"{socket.gethostname()} ({own}) is part of the cluster at {where} with {offer}; Ctrl-C leaves it")
                ended = _watch(node, host, port, wait_s, say)
        except _SlowStart as error:
            slow_starts += 1
            if slow_starts == _SLOW_STARTS:
                raise
            say(f"{error}; tried once more")
            continue
        if ended is None:
            say(f"the cluster at {where} has ended; {socket.gethostname()} leaves it")
            return
        short_lives = short_lives + 1 if time.monotonic() - began < _SHORT_LIFE_S else 0
        if short_lives == _SHORT_LIVES:
            raise JoinError(
                f"{ended}, {_SHORT_LIVES} times in a row within {_SHORT_LIFE_S:g} s; its logs are in {_logs(node)}"
            )
        say(f"{ended} (its logs are in {_logs(node)}); this host joins again")


def _token(token_file: str | None) -> str:
    """Show the cluster's token; a sentence about it."""
    if token_file is not None:
        path = Path(token_file).expanduser()
        if not path.is_file() or not path.read_text(encoding="utf-8").strip():
            raise JoinError(
                f"--token-file is {token_file}, which is no file with a token: copy ~/.ray/auth_token of trainer rank 0's host "
                "there"
            )
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ |= {"RAY_AUTH_TOKEN_PATH": str(path), "RAY_AUTH_MODE": "token"}
    return use_token()


def _head(host: str, port: int) -> Head:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except ConnectionRefusedError:
        return "refuses"
    except OSError:
        return "silent"
    return "there"


def _await_head(host: str, port: int, wait_s: float, say: Callable[[str], None]) -> None:
    end, said = time.monotonic() + wait_s, -float("inf")
    while (found := _head(host, port)) != "there":
        now = time.monotonic()
        why = "no Ray listens there" if found == "refuses" else "the host does not answer"
        if now >= end:
            raise JoinError(
                f"no cluster at {host}:{port} within --wait {wait_s:g} s ({why}): start the trainer with "
                "rollout.ray_address=here, correct the address, or open the port"
            )
        if now - said >= _SAY_S:
            said = now
            say(f"waiting for the trainer's cluster at {host}:{port} ({why}), {end - now:.0f} s left of --wait")
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _node(where: str, own: str, offer: Offer, token: str) -> Iterator[Node]:
    """A node of the cluster in the body; afterwards no process of it is left."""

    def parameters() -> RayParams:
        """Anew for each attempt: a node writes into them."""
        return RayParams(
            gcs_address=where,
            redis_address=where,
            node_ip_address=own,
            num_cpus=os.cpu_count(),
            num_gpus=len(offer.gpus),
            resources={ENGINE_SLOT: offer.engines} if offer.engines else {},
        )

    node = None
    before = set(psutil.Process().children(recursive=True))
    try:
        try:
            with visible(offer.gpus), only_what_is_needed():
                node = patiently(lambda: Node(parameters(), head=False, shutdown_at_exit=False, spawn_reaper=True))
        except Exception as error:
            if "Version mismatch" in str(error):
                reason = " ".join(str(error).split())
                raise JoinError(f"{reason}: install the trainer's Ray and Python here") from error
            kind = _SlowStart if "timed out during startup" in str(error) else JoinError
            raise kind(
                f"this host (Ray {ray.__version__}, Python {platform.python_version()}) could not join the cluster at {where} "
                f"({first_line(error)}); its token: {token}"
            ) from error
        yield node
    finally:
        interrupts = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
        processes = set(psutil.Process().children(recursive=True)) - before  # engines' own processes too
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        _, left = psutil.wait_procs(processes, timeout=_LEAVE_S if node is not None else 0)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_LEAVE_S)
        for each, handler in interrupts.items():
            signal.signal(each, handler)


def _watch(node: Node, host: str, port: int, wait_s: float, say: Callable[[str], None]) -> str | None:
    """Wait until the head or the node ends. None: the head; else what of the node, and how.

    Raises:
        JoinError: the head's machine has been silent for wait_s.
    """
    refusals, answered, said = 0, time.monotonic(), -float("inf")
    while True:
        time.sleep(_LOOK_S)
        found, now = _head(host, port), time.monotonic()
        refusals = refusals + 1 if found == "refuses" else 0
        if refusals == _REFUSALS:
            return None
        for kind, process in node.dead_processes():
            if found == "there":  # else it has ended because of that
                return f"Ray's {kind} of this host (process {process.pid}) has ended with status {process.returncode}"
        if found != "silent":
            answered = now
        elif now - answered >= wait_s:
            raise JoinError(f"the trainer's host {host} has not answered for --wait {wait_s:g} s")
        elif now - max(said, answered) >= _SAY_S:
            said = now
            say(f"the trainer's host {host} has not answered for {now - answered:.0f} s, of --wait {wait_s:g}")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _logs(node: Node) -> str:
    return str(node.get_logs_dir_path())
