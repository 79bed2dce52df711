"""Classification of Ray's errors: an engine is lost (replaceable), or Ray itself has failed (the run ends)."""

from __future__ import annotations

import contextlib

import psutil
import ray
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from marsrl.rollout.engines.protocol import EngineLost, WrongVersion
from marsrl.rollout.pool.replicas import Lost
from marsrl.rollout.text import first_line, last_line

_ENGINE_IS_LOST = (RayActorError, WorkerCrashedError, OutOfMemoryError, ObjectLostError)
_DECODING = ("submit", "collect", "abort")
_NEEDED = ("gcs_server", "raylet")
_LOW_ON_MEMORY = "running low on memory"  # Ray's message about a process killed by its memory monitor
_GO_ON = "resume from the last checkpoint with run.resume=auto"


def lost_or_raise(error: RayError, method: str) -> Lost:
    """Return Lost if the `error` of a failed call means that the engine is lost.

    Raises:
        RuntimeError: Ray is gone, or its object store is full.
        Exception: the engine's own error, if it concerns the call rather than the engine: a rejected call
            (WrongVersion, ValueError), or an error outside of decoding.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        raise RuntimeError(
            f"Ray's object store, which carries tokens and log-probs, is full ({first_line(cause)}): free space on the disk "
            f"that it spills to (/tmp/ray), raise rollout.object_store_mib, or lower rollout.prompts_per_step; {_GO_ON}"
        ) from error
    if isinstance(error, RayTaskError):
        if isinstance(cause, EngineLost):
            return Lost(first_line(cause))
        if isinstance(cause, WrongVersion | ValueError) or method not in _DECODING:
            raise error.as_instanceof_cause() from None  # keeps the type WrongVersion
        return Lost(f"{method} raised {type(cause).__name__}: {first_line(cause)}")
    if not isinstance(error, _ENGINE_IS_LOST):
        raise RuntimeError(f"Ray failed in {method} ({type(error).__name__}: {first_line(error)}); {_GO_ON}") from error
    _check_own_node(error)
    low = next((line.strip() for line in str(error).splitlines() if _LOW_ON_MEMORY in line), None)
    if low is not None or isinstance(error, OutOfMemoryError):
        return Lost(
            f"killed by Ray's memory monitor ({(low or first_line(error))[:300]}): lower rollout.vllm.kv_cache_mib, "
            "rollout.vllm.max_num_seqs or rollout.engines, or add memory"
        )
    return Lost(f"its process has died ({last_line(error)})")


def _check_own_node(error: BaseException) -> None:
    """Raise RuntimeError if the cluster has lost this process's own node, and with it all engines."""
    check_head()
    here = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == here and node["Alive"] for node in ray.nodes()):
        raise RuntimeError(
            f"Ray is gone: the raylet of this machine has died ({last_line(error)}); see its logs in "
            f"/tmp/ray/session_latest/logs. Restart Ray if rollout.ray_address names a cluster, and {_GO_ON}"
        ) from error


_processes: dict[str, psutil.Process] = {}  # essential processes of a Ray cluster that this process started


def note_processes() -> None:
    """Watch the processes of a Ray cluster that this process started (see check_head)."""
    children = {child.name(): child for child in psutil.Process().children()}
    _processes.update({name: children[name] for name in _NEEDED if name in children})


def forget_processes() -> None:
    """Stop watching, before Ray is shut down."""
    _processes.clear()


def check_head() -> None:
    """Raise RuntimeError if a watched Ray process has ended. Cheap.

    When the cluster's head is gone, Ray itself reports nothing for a minute, and then aborts this process.
    """
    for name, process in _processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                continue
        raise RuntimeError(
            f"Ray is gone: its {name} (process {process.pid}) has ended; see its logs in /tmp/ray/session_latest/logs, and "
            f"{_GO_ON}"
        )
