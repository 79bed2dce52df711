"""Ctrl-C and SIGTERM of a run that trains."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rank_pair import RankPair

from marsrl.trainer.runs.stop import Stopped, StopSignals, handlers_restored


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
    found = two_ranks.run(Path(__file__).with_name("stop_worker.py"), {})
    assert found == ["done stopped again", "None stopped None"]
