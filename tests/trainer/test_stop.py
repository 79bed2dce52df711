"""Ctrl-C and SIGTERM of a run that trains; ranks that wait for rank 0, asleep and without a limit; and ranks that fall silent
or end with an error, which stops the others with their name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_pair import RankPair

from marsrl.trainer.runs.heartbeat import Heartbeat, RankLost
from marsrl.trainer.runs.stop import Stopped, StopSignals, handlers_restored

WORKER = Path(__file__).with_name("meeting_worker.py")
LIMIT_S, LATE_S = 6.0, 7.0  # of a collective; how late rank 0 comes to two of five meetings


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_another_ends_at_once(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    times = [0.0, 0.9, 1.1]  # within a second two are one Ctrl-C, which torchrun brings again
    signals, before = StopSignals(iter(times).__next__), signal.getsignal(number)
    with signals.noted():
        assert not signals.is_asked
        os.kill(os.getpid(), number)
        assert signals.is_asked and "the last finished step is saved first" in capsys.readouterr().err
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_the_way_out_of_a_stopped_run_is_undisturbed_and_ends_with_the_handlers_of_before() -> None:
    signals, before = StopSignals(lambda: 0.0), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped), handlers_restored():
        try:
            with signals.noted():
                for number in (signal.SIGINT, signal.SIGTERM):  # one Ctrl-C that comes twice is one
                    os.kill(os.getpid(), number)
                assert signals.is_asked
                raise Stopped
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the same Ctrl-C, by torchrun
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_all_ranks_stop_where_rank_0_does_and_nobody_waits(two_ranks: RankPair) -> None:
    assert two_ranks.run(WORKER, {}) == [["done", "stopped", "again"], ["None", "stopped", "None"]]


def test_a_stage_may_be_longer_than_a_collective_waits_and_who_waits_sleeps(two_ranks: RankPair) -> None:
    first, other = two_ranks.run(WORKER, {"limit_s": LIMIT_S, "late_s": LATE_S})
    assert first[:5] == other[:5] == ["None", "b'batch'", "b'0 1'", "False", "None"]
    cpu_s, num_sleepers, num_keys = float(other[5]), *map(int, other[6:8])
    assert cpu_s < 0.2 * 2 * LATE_S  # a rank that polls takes all of it
    assert num_sleepers == 0 and num_keys == 0  # of meetings before the last


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


class LostStore:
    """A store until `is_lost`."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.is_lost = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_lost:
            raise dist.DistNetworkError("Connection reset by peer")
        return getattr(self._store, name)


def test_a_lost_store_is_named_where_a_collective_meets_it_first() -> None:
    store: Any = LostStore(dist.HashStore())
    heartbeat = Heartbeat(store, 1, 2, stop=lambda reason, silent: None, silence_s=6000.0, beat_s=600.0)
    with pytest.raises(RankLost, match=r"rank 0 or its machine is gone: .*reset by peer"), heartbeat:
        store.get("beat/1")
        store.is_lost = True
        store.add("meeting", 1)


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
