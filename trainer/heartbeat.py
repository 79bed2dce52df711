"""Every rank says that it lives; when one falls silent, the others say which and stop, wherever they wait.

A collective does not tell a dead rank from a slow one: its timeout is longer than the longest rollout, which all ranks
but the first spend waiting in one. torchrun stops the ranks of a machine when one of them dies, not those of others.

    rank r: beat/r = 1, 2, 3, ...  (every BEAT_S)        rank 0 looks at all beats, the others at rank 0's
    who finds a silent one: lost = "rank 17 ..."         everybody looks at lost, and stops
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

BEAT_S = 5.0
SILENT_S = 40.0  # stopped within 60 s: this, two beats, and what rank 0 takes to close its engines
GRACE_S = 10.0  # for the main thread to come back from a collective; then the process ends without it


class Heartbeat:
    """A thread for the life of a run: `with Heartbeat(store, rank, world_size): ...`.

    Args:
        store: a connection of its own: a client answers one question at a time, and a rank may be waiting in it.
        stop: called once, in the thread, with the reason.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        stop: Callable[[str], None] | None = None,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._store, self._rank, self._beat_s, self._silent_s = store, rank, beat_s, silent_s
        self._watched = [r for r in range(world_size) if r != rank] if rank == 0 else [0]
        self._stop = stop or self._stop_process
        self._left = threading.Event()
        self._error: BaseException | None = None  # what this rank leaves with
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self._left.set()
        self._thread.join(timeout=GRACE_S)  # a store that does not answer must not hold up the way out

    def _run(self) -> None:
        counts = dict.fromkeys(self._watched, b"")
        changed = dict.fromkeys(self._watched, time.monotonic())  # a rank that never beats is silent from now on
        beat, reason = 0, None
        while reason is None and not self._left.wait(self._beat_s):
            beat += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{beat} {socket.gethostname()} {os.getpid()}")
                if self._store.check(["lost"]):
                    reason = self._store.get("lost").decode()
                    break
                for r in self._watched:
                    now = self._store.get(f"beat/{r}") if self._store.check([f"beat/{r}"]) else b""
                    if now != counts[r]:
                        counts[r], changed[r] = now, time.monotonic()
                since = time.monotonic() - self._silent_s
                silent = [r for r in self._watched if changed[r] < since and counts[r] != b"done"]
                if silent:
                    named = ", ".join(f"rank {r}{_place(counts[r])}" for r in silent)
                    reason = f"silent for {self._silent_s:.0f} s: {named}"
                    self._store.set("lost", reason)
            except RuntimeError as error:  # its server went down with rank 0 or with torchrun on that machine
                reason = f"rank 0 or its machine is gone: the store does not answer ({str(error).splitlines()[0]})"
        if reason is not None:
            self._stop(reason)
            return
        try:
            if self._error is None:
                self._store.set(f"beat/{self._rank}", "done")
            else:
                how = f"{type(self._error).__name__}: {self._error}"
                self._store.set("lost", f"rank {self._rank} ({socket.gethostname()}) ended with {how}")
        except RuntimeError:
            return  # the others are gone already, and so is their interest

    def _stop_process(self, reason: str) -> None:
        print(
            f"marsrl: rank {self._rank} stops: {reason}; go on from the last checkpoint with run.resume=auto",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGTERM)  # main.py's way out, if the main thread hears of it
        if not self._left.wait(GRACE_S):
            os._exit(1)


def heartbeat() -> Heartbeat:
    """Of this rank, on a connection of its own to the store of the process group."""
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=SILENT_S))
    return Heartbeat(dist.PrefixStore("marsrl/heartbeat", store), dist.get_rank(), dist.get_world_size())


def _place(beat: bytes) -> str:
    """The machine and process of a beat; nothing where there was none."""
    _, host, pid = beat.decode().split(" ") if beat else ("", "", "")
    return f" ({host}, process {pid})" if host else ""
