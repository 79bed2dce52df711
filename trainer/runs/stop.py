"""Handling of Ctrl-C and SIGTERM: a run saves its last finished step first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from marsrl.trainer.runs.failure import RANK_0_PRINTS_S

_SAME_S = 1.0  # Seconds within which the terminal and torchrun both deliver one Ctrl-C.
_GONE_S = 2.0  # Seconds within which a killed torchrun ends after its connections close.
_ends_now = threading.Event()


class Stopped(KeyboardInterrupt):
    """Raised on all ranks after a stop signal (Ctrl-C or SIGTERM).

    The last finished step, if any, is then in a checkpoint.
    """


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the body. Main thread only."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt for Ctrl-C and for torchrun's SIGTERM. Ctrl-C in a terminal causes both; ignore the second."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def let_first_rank_end(launcher: int) -> None:
    """Wait for torchrun, if it is alive, to end this rank.

    torchrun ends all ranks once one has ended, and rank 0 exits last: SIGTERM while Ray shuts down would kill rank 0 before it
    prints its last line.
    """
    signal.signal(signal.SIGTERM, interrupt)
    with suppress(KeyboardInterrupt):
        if os.getppid() == launcher:
            time.sleep(RANK_0_PRINTS_S)


def has_ended(launcher: int) -> bool:
    """Return True if torchrun, this process's parent, has ended, or ends within _GONE_S.

    The wait is needed because the connections of a killed process close before its children get another parent.
    """
    end = time.monotonic() + _GONE_S
    while os.getppid() == launcher and time.monotonic() < end:
        time.sleep(0.02)
    return os.getppid() != launcher


def end_now() -> None:
    """End this process as a second Ctrl-C does, without saving. Thread-safe."""
    _ends_now.set()
    os.kill(os.getpid(), signal.SIGTERM)


class StopSignals:
    """Recorder of SIGINT and SIGTERM. After the first one, is_asked is True; the run checks it where it can stop.

    A second signal ends the run at once.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_asked = False
        self._clock = clock
        self._asked_s = 0.0
        self._parent = os.getppid()  # torchrun; without it the ranks cannot communicate to save a last checkpoint.

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record signals during the body instead of raising KeyboardInterrupt. Main thread only.

        After an error, recording continues until handlers_restored, so that the duplicate of a Ctrl-C cannot disturb the exit.
        """
        before = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}
        yield
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now_s, is_alone = self._clock(), _ends_now.is_set() or os.getppid() != self._parent
        if not self.is_asked and not is_alone:
            self.is_asked, self._asked_s = True, now_s
            print(
                "marsrl: stopping after saving the last finished step; press Ctrl-C again to stop at once",
                file=sys.stderr,
            )
        elif is_alone or now_s - self._asked_s > _SAME_S:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
