"""Decoding goes on while the trainer trains: an EventScheduler in a thread of its own.

    trainer's thread                         "marsrl-rollout"
    next_batch: ask, wait for a batch  <---  submit what is due -> collect (unlocked) -> absorb, round and round
    train
    with resting(new versions):  --------->  stands still, engines idle, every token that was decoded kept
        publish, evaluate
    snapshot (any time)

The books are touched under one lock; decoding and judging happen outside of it. An error in the thread is raised by the
trainer's next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from marsrl.rollout.config import RolloutConfig
from marsrl.rollout.engines.protocol import Progress
from marsrl.rollout.schedule.event_scheduler import EventScheduler
from marsrl.rollout.schedule.ledger import RolloutState, StepBatch
from marsrl.rollout.tasks.protocol import ProblemSource
from marsrl.rollout.team import Team

_COLLECT_S = 0.1  # how long results are waited for at a time: what a call from the trainer may have to wait
_PROGRESS_S = 0.2
_IDLE_S = 0.02  # nothing is under way: the trainer is rollout.overlap steps behind, or judges are at work


class BackgroundScheduler:
    """What the trainer's loop calls when rollout.overlap > 0; the same calls as scheduler.Scheduler. See the module."""

    def __init__(
        self, config: RolloutConfig, team: Team, source: ProblemSource, *, seed: int, trains_whole: bool = False
    ) -> None:
        self._scheduler = EventScheduler(config, team, source, seed=seed, trains_whole=trains_whole)
        self._team = team
        self._changed = threading.Condition()  # its lock guards the scheduler's books
        self._thread: threading.Thread | None = None
        self._wants_rest = False
        self._is_collecting = False
        self._is_closed = False
        self._error: BaseException | None = None

    @property
    def on_stage(self) -> Callable[[], None] | None:
        """Told when a stage begins, in either thread."""
        return self._scheduler.on_stage

    @on_stage.setter
    def on_stage(self, listener: Callable[[], None] | None) -> None:
        self._scheduler.on_stage = listener

    @property
    def on_episode(self) -> Callable[[str, bool], None] | None:
        """Told when an episode begins or ends, in either thread."""
        return self._scheduler.on_episode

    @on_episode.setter
    def on_episode(self, listener: Callable[[str, bool], None] | None) -> None:
        self._scheduler.on_episode = listener

    @property
    def num_unfinished(self) -> int:
        with self._changed:
            return self._scheduler.num_unfinished

    @property
    def is_playing(self) -> bool:
        with self._changed:
            return self._scheduler.is_playing

    def next_batch(self, versions: Mapping[str, int], progress: Progress | None = None) -> StepBatch:
        """The oldest batch that is not trained yet; waits for it where there is none.

        Raises:
            RuntimeError: the thread has failed; its own error is the cause.
        """
        if self._thread is None:
            self._scheduler.resume(versions)
            self._thread = threading.Thread(target=self._run, name="marsrl-rollout", daemon=True)
            self._thread.start()
        before = self._num_decoded() if progress is not None else 0
        with self._changed:
            self._scheduler.ask()
            self._changed.notify_all()
            while (batch := self._scheduler.take()) is None:
                self._check()
                self._changed.wait(_PROGRESS_S)
                if progress is not None:
                    self._changed.release()
                    try:
                        progress(self._num_decoded() - before)
                    finally:
                        self._changed.acquire()
            return batch

    @contextmanager
    def resting(self, versions: Mapping[str, int] | None = None) -> Iterator[None]:
        """Engines idle, and free for other calls, in the body; afterwards decoding goes on, under `versions` if given.

        After an error in the body nothing goes on.
        """
        if self._thread is None:
            yield
            return
        with self._changed:
            self._wants_rest = True
            self._changed.wait_for(lambda: not self._is_collecting)
            self._check()
            self._scheduler.rest()
        yield
        with self._changed:
            self._scheduler.resume(versions if versions is not None else self._scheduler.versions)
            self._wants_rest = False
            self._changed.notify_all()

    def snapshot(self) -> RolloutState:
        with self._changed:
            self._check()
            return self._scheduler.snapshot()

    def restore(self, state: RolloutState) -> None:
        self._scheduler.restore(state)

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice. What it had under way is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # handed to the trainer's thread
            with self._changed:
                self._error = error
                self._is_collecting = False
                self._changed.notify_all()

    def _round(self) -> bool:
        """Submit, collect, absorb; False where the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._wants_rest)
            if self._is_closed:
                return False
            self._scheduler.submit()
            if not self._scheduler.is_decoding:
                self._scheduler.absorb([])  # what has been judged
                self._changed.notify_all()
                self._changed.wait(_IDLE_S)
                return True
            self._is_collecting = True
        results = self._scheduler.collect(_COLLECT_S)
        with self._changed:
            self._is_collecting = False
            self._scheduler.absorb(results)
            self._changed.notify_all()
        return True

    def _num_decoded(self) -> int:
        return sum(sum(pool.num_decoded()) for pool in self._team.pools.values())

    def _check(self) -> None:
        if self._error is not None:
            error = self._error
            said = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the rollout's thread has failed: {said}") from error
