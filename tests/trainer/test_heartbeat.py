"""A rank that falls silent, or ends with an error, stops the others with its name; one that is done does not."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from marsrl.trainer.runs import heartbeat
from marsrl.trainer.runs.heartbeat import Heartbeat, RankLost


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


def test_the_first_beat_is_not_waited_for() -> None:
    """A rank that is lost before the second has a machine and a process in what is said of it."""
    store, until = dist.HashStore(), time.monotonic() + 60
    with Heartbeat(store, 1, 3, silence_s=1e9, beat_s=120.0):
        while not store.check(["beat/1"]):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert str(os.getpid()) in store.get("beat/1").decode().split()
    assert store.get("beat/1") == b"done"


def test_all_hear_which_rank_ended_with_an_error() -> None:
    store = dist.HashStore()
    ranks = [Rank(store, r, silence_s=1e9) for r in range(3)]
    with ranks[0].heartbeat, ranks[1].heartbeat:
        with contextlib.suppress(MemoryError), ranks[2].heartbeat:
            raise MemoryError("no room")
        assert all(rank.stopped.wait(60) for rank in ranks[:2])
    assert all("rank 2 (" in rank.reason and "MemoryError: no room" in rank.reason for rank in ranks[:2])


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


def test_a_heartbeat_that_is_left_before_the_end_says_so_once() -> None:
    """A run enters it before its engines start and leaves it before they are closed."""
    store = dist.HashStore()
    rank, told = Rank(store, 0, silence_s=1e9), list[bytes]()
    with contextlib.suppress(MemoryError), contextlib.ExitStack() as stack:
        stack.enter_context(rank.heartbeat)
        stack.callback(lambda: told.append(store.get("lost")))  # closing engines
        stack.push(rank.heartbeat)
        raise MemoryError("no room")
    assert b"MemoryError: no room" in told[0] and not rank.stopped.is_set()


class DeafStore:
    """A store of a machine that can lose its power: what is asked of it then has no answer and no error."""

    def __init__(self) -> None:
        self._store, self.power = dist.HashStore(), threading.Event()
        self.power.set()

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any) -> Any:
            self.power.wait()
            return getattr(self._store, name)(*words)

        return ask


def test_a_rank_stops_when_the_machine_of_rank_0_has_lost_its_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves, while its heartbeat still asks that machine."""
    monkeypatch.setattr(heartbeat, "GRACE_S", 3600.0)
    store = DeafStore()
    store.set("beat/0", "1 host1 4711")
    rank = Rank(store, 2, silence_s=2.0)  # type: ignore[arg-type]
    with rank.heartbeat:
        # with its first beat it has not yet seen rank 0's
        while not store.check(["beat/2"]) or store.get("beat/2").startswith(b"1 "):
            time.sleep(0.01)
        store.power.clear()
        assert rank.stopped.wait(60)
    store.power.set()
    assert rank.reason == (
        "rank 0 (host1, process 4711) or its machine is gone: its store has not answered for run.silence_s = 2 s"
    )
