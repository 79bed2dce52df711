"""A rank that falls silent, or ends with an error, stops the others with its name; one that is done does not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from marsrl.trainer.runs.heartbeat import Heartbeat, RankLost

LAUNCHED = """
import os, threading
import torch.distributed as dist
from marsrl.trainer.runs.heartbeat import Heartbeat
ours, launchers = os.pipe()
if os.fork():  # the launcher, killed once its rank has begun
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(launchers, str(server.port).encode())
    server.get("beat/0")
    os._exit(9)
store, stopped = dist.TCPStore("127.0.0.1", int(os.read(ours, 9))), threading.Event()
def stop(reason, silent):
    print(reason, silent, flush=True)
    stopped.set()
try:
    with Heartbeat(store, 0, 1, stop=stop, beat_s=0.2, silence_s=1e9):
        stopped.wait(60)
        raise RuntimeError("a collective that broke")
except KeyboardInterrupt:
    print("interrupted", flush=True)
os._exit(0)
"""


class Rank:
    """A heartbeat of one of three ranks that keeps what it would have stopped the process for. now: of its clock, which stands
    still."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank, self.now = store, rank, 0.0
        self.stopped, self.reason = threading.Event(), ""
        options = {"beat_s": 0.02, "silence_s": 60.0, "clock": lambda: self.now}
        self.heartbeat = Heartbeat(store, rank, 3, stop=self._stop, **options)  # type: ignore[arg-type]

    def _stop(self, reason: str, silent: Sequence[str]) -> None:
        self.reason = reason
        self.stopped.set()

    def looks(self) -> None:
        """Until it has looked at the others' beats once, from beginning to end."""
        last = self._beats() + 2
        while self._beats() < last and not self.stopped.is_set():
            time.sleep(0.01)

    def _beats(self) -> int:
        return int(self.store.get(f"beat/{self.rank}").split()[0])


def test_all_hear_which_rank_is_silent() -> None:
    store = dist.HashStore()
    first, second = (Rank(store, r) for r in range(2))  # the third was killed before its first beat
    with first.heartbeat, second.heartbeat:
        for seconds in (30.0, 59.0):
            for rank in (first, second, first):
                rank.now = seconds
                rank.looks()
            assert not first.stopped.is_set()
        first.now = 61.0
        assert first.stopped.wait(60) and second.stopped.wait(60)
    assert first.reason == second.reason == "silent for run.silence_s = 60 s: rank 2"


@pytest.mark.parametrize(
    ("error", "said", "left_with"),
    [(KeyboardInterrupt(), "was interrupted", KeyboardInterrupt), (OSError("x"), "ended with OSError: x", RankLost)],
)
def test_a_run_is_interrupted_where_another_rank_was_and_fails_where_one_failed(
    error: BaseException, said: str, left_with: type[BaseException]
) -> None:
    store = dist.HashStore()
    first, other = (Rank(store, r) for r in (0, 2))
    with pytest.raises(left_with, match=rf"rank 2 \(.*\) {said}"), first.heartbeat:
        with contextlib.suppress(type(error)), other.heartbeat:
            raise error
        assert first.stopped.wait(60)
        raise RuntimeError("a collective that broke")


def test_a_rank_that_is_done_is_not_missed() -> None:
    store = dist.HashStore()
    first, other = (Rank(store, r) for r in (0, 2))
    store.set("beat/1", "done")
    with first.heartbeat:
        with other.heartbeat:
            pass
        first.now = 1e9
        first.looks()
        assert not first.stopped.is_set()


def test_a_killed_launcher_interrupts_and_is_no_lost_rank() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHED], capture_output=True, text=True, timeout=120)
    reason, end = done.stdout.splitlines()
    assert reason.startswith("torchrun has ended, and its store with it: ") and reason.endswith(" []")
    assert end == "interrupted"
