"""Batches of groups for the training loop, decoded in a separate thread; with rollout.overlap > 0, concurrently with training.

    trainer's thread                         "marsrl-rollout"
    next_batch: want, wait for a batch  <--  loop: submit what is due -> collect (unlocked) -> absorb
    train
    with resting(new versions):  --------->  pauses, engines idle (or without one adapter's requests); decoded tokens are kept
        publish, evaluate
    snapshot (any time)

One lock guards the stages; decoding and judging happen outside of it. The trainer's next call raises an error of the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from marsrl.rollout.engines.protocol import Progress
from marsrl.rollout.player.stages import RolloutState, Stages, StepBatch

_COLLECT_S = 0.1  # timeout of one collect; a call by the trainer may have to wait this long
_PROGRESS_S = 0.2
_IDLE_S = 0.02  # pause if nothing is being decoded: the trainer is rollout.overlap steps behind, or judges are working


class Rollout:
    """Source of batches for the training loop; see the module."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self._pools = stages.team.pools
        self._is_beside = stages.config.overlap > 0
        self._changed = threading.Condition()  # its lock guards the stages
        self._thread: threading.Thread | None = None
        self._wants_rest = False
        self._is_collecting = False
        self._is_closed = False
        self._error: BaseException | None = None

    def listen(self, on_stage: Callable[[], None], on_episode: Callable[[str, bool], None]) -> None:
        """Set callbacks: on_stage when a stage begins, on_episode(id, has_ended) at an episode's beginning and end."""
        self.stages.on_stage, self.stages.on_episode = on_stage, on_episode

    @property
    def num_unfinished(self) -> int:
        with self._changed:
            return self.stages.num_unfinished

    @property
    def is_playing(self) -> bool:
        with self._changed:
            return self.stages.is_playing

    def next_batch(self, versions: Mapping[str, int], progress: Progress | None = None) -> StepBatch:
        """Return the oldest untrained batch; play or wait for one if there is none.

        versions: the version held by every policy's engines.

        Raises RuntimeError: the thread has failed; its error is the cause.
        """
        if self._thread is None:  # resume here only in the first call; later, `resting` resumes decoding
            self.stages.resume(versions)
            if self._is_beside:
                self._thread = threading.Thread(target=self._run, name="marsrl-rollout", daemon=True)
                self._thread.start()
        before = self._num_decoded() if progress is not None else 0
        with self._changed:
            self.stages.want()
            self._changed.notify_all()
        while (batch := self._take()) is None:
            if progress is not None:
                progress(self._num_decoded() - before)
        if progress is not None and not self._is_beside:
            progress(self._num_decoded() - before)
        return batch

    @contextmanager
    def resting(
        self, versions: Mapping[str, int] | None = None, adapters: Sequence[str] | None = None
    ) -> Iterator[None]:
        """Keep engines idle and free for other calls inside the block; afterwards resume decoding, under `versions` if given.

        adapters: abort only these adapters' requests; the block updates them while the engines decode other requests, whose
            results wait.

        After an error in the block, decoding does not resume.
        """
        if self._thread is None:
            yield
            return
        with self._changed:
            self._wants_rest = True
            self._changed.wait_for(lambda: not self._is_collecting)
            self._check()
            self.stages.rest(adapters)
        yield
        with self._changed:
            self.stages.resume(versions if versions is not None else self.stages.player.versions)
            self._wants_rest = False
            self._changed.notify_all()

    def snapshot(self) -> RolloutState:
        with self._changed:
            self._check()
            return self.stages.snapshot()

    def restore(self, state: RolloutState) -> None:
        self.stages.restore(state)

    def close(self) -> None:
        """Stop the thread and wait for it; may be called twice. Unfinished work is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _take(self) -> StepBatch | None:
        """Return a batch, or None after a while without one."""
        # Replaced engines get their weights here, since only this thread may send them.
        for pool in self._pools.values():
            pool.give_weights()
        if not self._is_beside:
            if (batch := self.stages.take()) is None:
                self.stages.advance(_PROGRESS_S)
            return batch
        with self._changed:
            if (batch := self.stages.take()) is None:
                self._check()
                self._changed.wait(_PROGRESS_S)
            return batch

    def _run(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # re-raised in the trainer's thread
            with self._changed:
                self._error = error
                self._is_collecting = False
                self._changed.notify_all()

    def _round(self) -> bool:
        """Submit, collect, absorb; return False if the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._wants_rest)
            if self._is_closed:
                return False
            self.stages.player.submit()
            if not self.stages.player.is_decoding:
                self.stages.absorb([])  # process completions that were judged meanwhile
                self._changed.notify_all()
                self._changed.wait(_IDLE_S)
                return True
            self._is_collecting = True
        results = self.stages.player.collect(_COLLECT_S)
        with self._changed:
            self._is_collecting = False
            self.stages.absorb(results)
            self._changed.notify_all()
        return True

    def _num_decoded(self) -> int:
        return sum(sum(pool.num_decoded()) for pool in self._pools.values())

    def _check(self) -> None:
        if self._error is not None:
            error = self._error
            said = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            raise RuntimeError(f"the rollout thread failed: {said}") from error
