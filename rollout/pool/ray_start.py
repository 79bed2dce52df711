"""Start of a Ray cluster on this host with this process as driver."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence

import psutil
import ray

from marsrl.rollout.config import HEAD_PORT
from marsrl.rollout.imports import environment
from marsrl.rollout.pool.addresses import own_address, split_address
from marsrl.rollout.pool.ray_faults import note_processes

_LOG = logging.getLogger(__name__)
# A connection that is silent for this long counts as dead. With Ray's default, a network cut of 20 s loses every engine.
_SILENT_MS = 120_000


def listens_at(address: str | None, own_host: str | None) -> tuple[str, int]:
    """Return the (host, port) on which a cluster started here listens; port 0: any free port.

    Raises RuntimeError: the port is taken.
    """
    if address is None:
        return "127.0.0.1", 0
    host, port = own_address(own_host), split_address(address, HEAD_PORT)[1]
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        # Set the option as Ray does, so that the port of a cluster that has just ended can be used.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind((host, port))
        except OSError as error:
            raise RuntimeError(
                f"rollout.ray_address is {address}, but port {port} of {host} is taken ({error.strerror}), perhaps by another "
                f"run's Ray or `ray start`; end that, or set rollout.ray_address=here:{port + 1} and join there"
            ) from error
    return host, port


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep this process's SIGTERM handling while Ray starts or is joined inside the block.

    ray.init installs a handler that dumps stacks and aborts; ours is restored afterwards. SIGTERM is blocked meanwhile, as
    Ray blocks SIGINT, so that Ray's processes inherit the block: torchrun and Slurm send SIGTERM to all processes, and without a
    raylet the current step could not finish.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ours = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Neither Ray nor this function can set a handler in another thread.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_head(object_store_mib: int, gpus: Sequence[int], where: tuple[str, int], *, is_open: bool) -> None:
    """Start a cluster's first node with this process as driver.

    where: the node's host and port (0: any). is_open: True if other hosts join. This node then offers no CPUs, so CPU engines
    run on those hosts alone.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.pop("RAY_ADDRESS", None)  # start our own cluster: do not join another one
    host, port = where
    for is_last in (False, False, True):
        before = set(psutil.Process().children(recursive=True))
        try:
            with visible(gpus), environment(RAY_GCS_SERVER_PORT=str(port)):
                ray.init(
                    address="local",
                    num_cpus=0 if is_open else os.cpu_count(),
                    num_gpus=len(gpus),
                    include_dashboard=False,
                    object_store_memory=object_store_mib << 20,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address=host,
                    _system_config={
                        "grpc_keepalive_timeout_ms": _SILENT_MS,
                        "prestart_worker_first_driver": False,  # no idle workers: engines have their own environment
                        "worker_niceness": 0,  # with Ray's default, 15, rollouts wait for everything else on the host
                    },
                )
            break
        except Exception as error:  # Ray waits a constant 30 s for the raylet, too short on a busy machine
            if "timed out during startup" not in str(error):
                raise
            if is_last:
                raise RuntimeError(
                    "Ray did not start within 30 s, three times: the machine is busy or short of memory; its logs are in "
                    "/tmp/ray/session_latest/logs. Free it, or run without Ray: rollout.placement=local"
                ) from error
            for process in set(psutil.Process().children(recursive=True)) - before:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            _LOG.warning("Ray did not start within its 30 s; starting it again")
    note_processes()


@contextlib.contextmanager
def visible(gpus: Sequence[int]) -> Iterator[None]:
    """Restrict CUDA_VISIBLE_DEVICES to the given GPUs, for processes started inside the block."""
    if not gpus:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = before.split(",") if before else [str(gpu) for gpu in range(max(gpus) + 1)]
    with environment(CUDA_VISIBLE_DEVICES=",".join(seen[gpu] for gpu in gpus)):
        yield
