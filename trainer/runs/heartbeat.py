"""Heartbeats of the ranks: when one rank goes silent, the other ranks name it and stop, wherever they wait.

Ranks wait for each other without a timeout (collective.py), and a collective cannot distinguish a dead rank from a slow one.
torchrun stops the ranks of a machine when one of them dies, but not those of other machines.

    rank r: beat/r = 1, 2, 3, ...  (every beat_s)        rank 0 watches all beats, other ranks watch rank 0's
    a rank finds a silent rank: lost = "rank 17 ..."     all ranks watch `lost`, and stop
    the store's machine lost power: no answer, no error  noticed by a thread that does not query the store
    on the silent rank's machine: SIGKILL                torchrun would wait half a minute after SIGTERM
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from marsrl.rollout.text import first_line
from marsrl.trainer.runs.stop import end_now, has_ended
from marsrl.trainer.visible import visible

BEAT_S = 5.0  # Upper bound; shorter with a short run.silence_s.
GRACE_S = 10.0  # Time for the main thread to leave a collective before the process is killed.
_GONE_S = 1.0  # Time to wait at exit for a thread blocked on a lost store.


class RankLost(RuntimeError):
    """Raised when another rank is silent or has ended."""


class Heartbeat:
    """Thread that sends heartbeats while a run lasts, and watches other ranks: `with Heartbeat(store, rank, world_size): ...`.

    store: a separate connection, because a client handles one request at a time, and the rank's main client may be waiting.
    silence_s: seconds within which a silent rank is detected (run.silence_s).
    go_on: returns the text that tells users how to resume.
    stop: called once, in the thread, with the reason and the last beats of the silent ranks; default: end this process.
    beat_s: seconds between beats.
    clock: returns seconds, to measure the silence of other ranks.

    If the run is stopped, the `with` block raises RankLost in place of any other exception, or KeyboardInterrupt if the user
    interrupted another rank.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        silence_s: float,
        go_on: Callable[[], str] = str,
        stop: Callable[[str, Sequence[str]], None] | None = None,
        beat_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._silence_s, self._go_on = store, rank, silence_s, go_on
        self._beat_s = beat_s if beat_s is not None else min(BEAT_S, silence_s / 8)
        self._watched = [r for r in range(world_size) if r != rank] if rank == 0 else [0]
        self._stop, self._clock = stop or self._stop_process, clock
        self._launcher = os.getppid()
        self._left = threading.Event()
        self._counts = dict.fromkeys(self._watched, b"")  # Last beat by rank.
        self._changed = dict.fromkeys(self._watched, clock())  # Time of the last new beat by rank.
        self._answered = threading.Event()  # The store has answered since the last check.
        self._stopping = threading.Lock()  # Acquired, and never released, by the thread that stops this process.
        self._reason: str | None = None
        self._is_interrupted = False  # True if the user interrupted another rank.
        self._error: BaseException | None = None  # The exception that this rank exits with.
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._watch = threading.Thread(target=self._watch_store, name="heartbeat-store", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self._left.set()
        # An unresponsive store must not delay the exit; a lost one never answers.
        self._thread.join(timeout=GRACE_S if self._reason is None else _GONE_S)
        if self._reason is not None and error is not None and not isinstance(error, RankLost):
            raise (KeyboardInterrupt if self._is_interrupted else RankLost)(self._reason) from error

    @property
    def silences_s(self) -> dict[int, float]:
        """Return {watched rank: seconds since its last new beat}; rank 0 watches all others. Thread-safe."""
        return {rank: self._clock() - since for rank, since in self._changed.items()}

    def _run(self) -> None:
        counts, changed = self._counts, self._changed
        beat, silent = 0, list[str]()
        while self._reason is None:
            beat += 1
            try:  # Beat at once, so that the machine of a rank that soon goes silent is known.
                self._store.set(f"beat/{self._rank}", f"{beat} {socket.gethostname()} {os.getpid()}")
                if self._store.check(["lost"]):
                    self._reason, silent, self._is_interrupted = json.loads(self._store.get("lost"))
                    break
                for r in self._watched:
                    newest = self._store.get(f"beat/{r}") if self._store.check([f"beat/{r}"]) else b""
                    if newest != counts[r]:
                        counts[r], changed[r] = newest, self._clock()
                self._answered.set()
                since = self._clock() - self._patience_s
                lost = [r for r in self._watched if changed[r] < since and counts[r] != b"done"]
                if lost:
                    named = ", ".join(f"rank {r}{_place(counts[r])}" for r in lost)
                    silent = [counts[r].decode() for r in lost]
                    self._reason = f"silent for run.silence_s = {self._silence_s:g} s: {named}"
                    self._store.set("lost", json.dumps([self._reason, silent, False]))
            except RuntimeError as error:  # The store's server ended with rank 0 or with rank 0's torchrun.
                self._reason, silent = self._store_is_gone(f"the store does not answer ({first_line(error)})")
            if self._reason is None and self._left.wait(self._beat_s):
                break
        if self._reason is not None:
            self._stop_once(self._reason, silent)
            return
        try:
            if self._error is None:
                self._store.set(f"beat/{self._rank}", "done")
            else:
                is_interrupted = isinstance(self._error, KeyboardInterrupt)
                how = "was interrupted" if is_interrupted else f"ended with {type(self._error).__name__}: {self._error}"
                message = f"rank {self._rank} ({socket.gethostname()}) {how}"
                self._store.set("lost", json.dumps([message, [], is_interrupted]))
        except RuntimeError as error:  # Other ranks have exited, or the body failed because the store is lost.
            if isinstance(self._error, dist.DistNetworkError):
                self._reason, _ = self._store_is_gone(f"the store does not answer ({first_line(error)})")

    def _watch_store(self) -> None:
        """Watch for a lost store: a machine that loses power closes no connections, so clients of its store wait forever."""
        waited_s = 0.0  # Counted in beats, so that a pause of this whole process counts as one beat.
        while self._reason is None and not self._left.wait(self._beat_s):
            waited_s = 0.0 if self._answered.is_set() else waited_s + self._beat_s
            self._answered.clear()
            if waited_s > self._patience_s:
                why = f"its store has not answered for run.silence_s = {self._silence_s:g} s"
                self._reason, silent = self._store_is_gone(why)
                self._stop_once(self._reason, silent)

    @property
    def _patience_s(self) -> float:
        """Longest tolerated silence, in seconds: a beat may be sent one interval late and read another interval late."""
        return self._silence_s - 2 * self._beat_s

    def _store_is_gone(self, how: str) -> tuple[str, list[str]]:
        """Return (reason to stop, [rank 0's last beat]); [] if torchrun has ended."""
        if has_ended(self._launcher):
            self._is_interrupted = True
            return f"torchrun has ended together with its store: {how}", []
        beat = self._counts.get(0, b"")
        return f"rank 0{_place(beat)} or its machine is gone: {how}", [beat.decode()] if beat else []

    def _stop_once(self, reason: str, silent: Sequence[str]) -> None:
        if self._stopping.acquire(blocking=False):
            self._stop(reason, silent)

    def _stop_process(self, reason: str, silent: Sequence[str]) -> None:
        text = f"marsrl: rank {self._rank} stops: {reason}; {self._go_on()}"
        print(visible(text), file=sys.stderr, flush=True)
        end_now()  # Ends the process if its main thread still handles signals.
        for beat in silent:
            _kill_sibling(beat)  # Collectives with the silent rank then fail.
        if not self._left.wait(GRACE_S):
            os._exit(1)


def heartbeat(silence_s: float, go_on: Callable[[], str]) -> Heartbeat:
    """Return this rank's heartbeat, on a separate connection to the process group's store."""
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=silence_s))
    store = dist.PrefixStore("marsrl/heartbeat", store)
    return Heartbeat(store, dist.get_rank(), dist.get_world_size(), silence_s=silence_s, go_on=go_on)


def _place(beat: bytes) -> str:
    """Return the machine and process of a beat; "" if there was none, or the rank had finished."""
    fields = beat.decode().split(" ")
    return f" ({fields[1]}, process {fields[2]})" if len(fields) == 3 else ""


def _kill_sibling(beat: str) -> None:
    """Send SIGKILL to the process of a beat if it is a child of our launcher: pids are meaningful on one machine only."""
    fields = beat.split(" ")
    if len(fields) != 3:
        return
    _, host, pid = fields
    with contextlib.suppress(OSError):  # The process has ended, or there is no /proc.
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if host == socket.gethostname() and parent == os.getppid():
            os.kill(int(pid), signal.SIGKILL)
