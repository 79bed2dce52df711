"""What stops a run: Ctrl-C, SIGTERM, too many non-finite steps, or a silent or failing rank, which the other ranks name.

Ranks that wait for rank 0 sleep, without a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from rank_pair import RankPair

from marsrl.rollout.orchestrations.verifier_corrector import VerifierCorrector
from marsrl.trainer.build import with_first_rank_dtypes
from marsrl.trainer.config import PolicyConfig, RunConfig
from marsrl.trainer.data.bad_steps import bad_batch_file, read_bad_batch
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch
from marsrl.trainer.learner.step_stats import StepStats
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.run import Run
from marsrl.trainer.runs import collective
from marsrl.trainer.runs.collective import all_true, barrier, broadcast_bytes, gather_bytes, rank, stop_together
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.failure import say_last
from marsrl.trainer.runs.heartbeat import Heartbeat, RankLost
from marsrl.trainer.runs.stop import Stopped, StopSignals, handlers_restored
from marsrl.trainer.weights.sync import Standby

# Seconds: time limit of a collective; delay of rank 0 at two of the five collectives (meetings).
LIMIT_S, LATE_S = (6.0, 7.0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_another_ends_at_once(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    times = [0.0, 0.9, 1.1]  # two signals within a second are one Ctrl-C, which torchrun repeats
    signals, before = StopSignals(iter(times).__next__), signal.getsignal(number)
    with signals.noted():
        assert not signals.is_asked
        os.kill(os.getpid(), number)
        assert signals.is_asked and "after saving the last finished step" in capsys.readouterr().err
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_stopped_run_exits_undisturbed_and_restores_handlers() -> None:
    signals, before = StopSignals(lambda: 0.0), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped), handlers_restored():
        try:
            with signals.noted():
                for number in (signal.SIGINT, signal.SIGTERM):  # a single Ctrl-C may arrive as both signals
                    os.kill(os.getpid(), number)
                assert signals.is_asked
                raise Stopped
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the same Ctrl-C, through torchrun
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def job(limit_s: float = 0, late_s: float = 0) -> list[list[str]]:
    """Return the results of both ranks. limit_s: time limit of a collective, for `meet`; 0: run `stand_by` instead."""
    dist.init_process_group("gloo")  # no short timeout: a busy machine may be slow
    results = meet(limit_s, late_s) if limit_s else stand_by()
    both = [each.decode().split("\n") for each in gather_bytes("\n".join(results).encode())]
    dist.destroy_process_group()
    return both


def meet(limit_s: float, late_s: float) -> list[str]:
    """Call five collectives; return their results, this rank's CPU seconds, and the numbers of threads and store keys left."""
    limit = datetime.timedelta(seconds=limit_s)
    dist.distributed_c10d._set_pg_timeout(limit)  # type: ignore[attr-defined]
    dist.distributed_c10d._get_default_store().set_timeout(limit)  # type: ignore[attr-defined]
    results = []
    begin = time.process_time()
    for call, is_late in (
        (barrier, True),
        (lambda: broadcast_bytes(b"batch" if rank() == 0 else None), True),
        (lambda: b" ".join(gather_bytes(str(rank()).encode())), False),
        (lambda: all_true(rank() == 0), False),
        (lambda: stop_together(None, "fine"), False),
    ):
        if rank() == 0 and is_late:
            time.sleep(late_s)  # in a run, rank 0 plays meanwhile
        results.append(str(call()))
    cpu_s = time.process_time() - begin
    sleepers = [thread.name for thread in threading.enumerate() if thread.name == "marsrl-meeting"]
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    left = sum(store.check([f"marsrl/meeting/{n}/{key}"]) for n in range(1, 5) for key in ("here", "all"))
    collective.PIECE_BYTES = 7  # splits later messages into many pieces
    return [*results, str(cpu_s), str(len(sleepers)), str(left)]


def stand_by() -> list[str]:
    def stopped() -> None:
        raise Stopped

    config = RunConfig().with_dtypes({"main": "bfloat16" if rank() == 0 else "float32"})
    standby = Standby({}, {}, {}, {} if rank() == 0 else None)
    results = [with_first_rank_dtypes(config).policies["main"].dtype, str(standby.during(lambda: "done"))]
    try:
        standby.during(stopped)
    except Stopped:
        results.append("stopped")
    return [*results, str(standby.during(lambda: "again"))]


def test_all_ranks_compute_and_stop_as_rank_0_does(two_ranks: RankPair) -> None:
    assert two_ranks.run(Path(__file__), {}) == [
        ["bfloat16", "done", "stopped", "again"],
        ["bfloat16", "None", "stopped", "None"],
    ]


@pytest.mark.slow
@pytest.mark.smoke
def test_stages_may_outlast_collective_timeouts(two_ranks: RankPair) -> None:
    first, other = two_ranks.run(Path(__file__), {"limit_s": LIMIT_S, "late_s": LATE_S})
    assert first[:5] == other[:5] == ["None", "b'batch'", "b'0 1'", "False", "None"]
    cpu_s, num_sleepers, num_keys = float(other[5]), *map(int, other[6:8])
    assert cpu_s < 0.2 * 2 * LATE_S  # a polling rank would use all of it
    assert num_sleepers == 0 and num_keys == 0  # no key of meetings before the last is left


LAUNCHED = """
import os, threading
import torch.distributed as dist
from marsrl.trainer.runs.heartbeat import Heartbeat
ours, launchers = os.pipe()
if os.fork():  # the launcher, killed once its rank has begun
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(launchers, str(server.port).encode())
    server.get("beat/0")
    del server  # its connections close before it is gone
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
    """One of three ranks, whose heartbeat records a reason to stop instead of stopping the process.

    now: clock of the heartbeat, which a test advances.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank, self.now = store, rank, 0.0
        self.stopped, self.reason = threading.Event(), ""
        options = {"beat_s": 0.02, "silence_s": 60.0, "clock": lambda: self.now}
        self.heartbeat = Heartbeat(store, rank, 3, stop=self._stop, **options)  # type: ignore[arg-type]

    def _stop(self, reason: str, silent: Sequence[str]) -> None:
        self.reason = reason
        self.stopped.set()

    def looks(self) -> None:
        """Wait until the heartbeat has checked the other ranks' beats once, from beginning to end."""
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
    ("error", "expected", "left_with"),
    [(KeyboardInterrupt(), "was interrupted", KeyboardInterrupt), (OSError("x"), "ended with OSError: x", RankLost)],
)
def test_ranks_share_interruption_and_failure_of_another_rank(
    error: BaseException, expected: str, left_with: type[BaseException]
) -> None:
    store = dist.HashStore()
    first, other = (Rank(store, r) for r in (0, 2))
    with pytest.raises(left_with, match=rf"rank 2 \(.*\) {expected}"), first.heartbeat:
        with contextlib.suppress(type(error)), other.heartbeat:
            raise error
        assert first.stopped.wait(60)
        raise RuntimeError("a collective that broke")


class LostStore:
    """Store that works until `is_lost`."""

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
    assert reason.startswith("torchrun has ended together with its store: ") and reason.endswith(" []")
    assert end == "interrupted"


FINE = StepStats(1.0, 1.0, 0.1, False, False, {}, 0, 0.0, 0.0, 0.0, num_updates=1)
BAD = dataclasses.replace(FINE, loss=math.nan, num_updates=0, is_skipped=True)


def sample(uid: str, advantage: float) -> TrainSequence:
    tokens = np.arange(3, dtype=np.int32)
    return TrainSequence(uid, tokens, tokens, np.ones(3, bool), np.zeros(3, np.float32), advantage, 0, 1.0)


def test_too_many_bad_steps_stop_the_run_and_name_their_batches(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "run", "preset")
    agents = VerifierCorrector.whole_team({})
    config = RunConfig(
        policies={"a": PolicyConfig(), "b": PolicyConfig()},
        agents={name: agent.model_copy(update={"policy": "a"}) for name, agent in agents.items()},
    )
    run = Run(config, directory, RunConsole(0), dict.fromkeys(["a", "b"]), {}, None, {})  # type: ignore[arg-type]
    batches = (MiniBatch((sample("x", 1.0), sample("y", math.nan)), 6),)
    for run.step, stats in enumerate([BAD, BAD, FINE, BAD, BAD], start=1):
        run.note_step("a", stats, batches)
        run.note_step("b", FINE, batches)  # another policy's good steps do not count for this one
        run.stop_if_diverged()
    run.step = 6
    run.note_step("a", BAD, batches)
    with pytest.raises(RuntimeError, match="policy a was not finite in 3 steps in a row") as error:
        run.stop_if_diverged()
    for step in (4, 5, 6):
        path = bad_batch_file(directory, step, "a")
        assert str(path) in str(error.value)
        batch = read_bad_batch(path)
        assert batch.suspects == ["y"] and [s.uid for s in batch.sequences] == ["x", "y"] and math.isnan(batch.loss)


def test_quoted_escape_sequences_have_no_effect_on_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    say_last("the tool said \x1b]0;owned\x07")
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told.isprintable() and capsys.readouterr().err == f"{told}\n"
