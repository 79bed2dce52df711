"""A rank that falls silent, or ends with an error, stops the others with its name; one that is done does not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
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
    """A heartbeat that keeps what it would have stopped the process for."""

    def __init__(self, store: dist.Store, rank: int, *, silence_s: float) -> None:
        self.stopped, self.reason = threading.Event(), ""
        self.heartbeat = Heartbeat(store, rank, 3, stop=self._stop, beat_s=0.02, silence_s=silence_s)

    def _stop(self, reason: str, silent: Sequence[str]) -> None:
        self.reason = reason
        self.stopped.set()


def test_all_hear_which_rank_is_silent() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, r, silence_s=2.0) for r in range(2)]  # the third was killed before its first beat
    with ranks[0].heartbeat, ranks[1].heartbeat:
        assert all(rank.stopped.wait(60) for rank in ranks)
    assert all("silent for run.silence_s = 2 s" in rank.reason and "rank 2" in rank.reason for rank in ranks)


@pytest.mark.parametrize(
    ("error", "said", "left_with"),
    [(KeyboardInterrupt(), "was interrupted", KeyboardInterrupt), (OSError("x"), "ended with OSError: x", RankLost)],
)
def test_a_run_is_interrupted_where_another_rank_was_and_fails_where_one_failed(
    error: BaseException, said: str, left_with: type[BaseException]
) -> None:
    store = dist.HashStore()
    first, other = (Rank(store, r, silence_s=1e9) for r in (0, 2))
    with pytest.raises(left_with, match=rf"rank 2 \(.*\) {said}"), first.heartbeat:
        with contextlib.suppress(type(error)), other.heartbeat:
            raise error
        assert first.stopped.wait(60)
        raise RuntimeError("a collective that broke")


def test_a_rank_that_is_done_is_not_missed() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, r, silence_s=1.0) for r in (0, 2)]
    store.set("beat/1", "done")
    with ranks[0].heartbeat:
        with ranks[1].heartbeat:
            pass
        assert not ranks[0].stopped.wait(2.0)


def test_a_killed_launcher_interrupts_and_is_no_lost_rank() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCHED], capture_output=True, text=True, timeout=120)
    reason, end = done.stdout.splitlines()
    assert reason.startswith("torchrun has ended, and its store with it: ") and reason.endswith(" []")
    assert end == "interrupted"
