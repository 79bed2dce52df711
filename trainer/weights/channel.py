"""From the trainer's weights to every engine's, and the proof that they arrived: one channel a policy, on every rank.

    Run.publish -> WeightChannel.publish(learner, version)       every rank, after an update; rank 0 has the engines
        trainer_scores                  the trainer's log-probs of fixed tokens, where a comparison is due  (comparison.py)
        _prepare                        what can be done while the engines still decode
        _deliver                        the engines are at rest and take the weights
        CheckedEngines.check            checksums of every tensor agree                                (checked_engines.py)
        EnginePool.replace              engines that were lost meanwhile: the new ones get the weights      (standby.py)
        CheckedEngines.compare          log-probs agree
        _settle                         the version is proven: what was kept for its sake may go

The path of one tensor:

    sync.backend=shm    Learner.export, whole on rank 0 -> FileChannel: its checksum, a file -> EnginePool.update_weights
                        -> the engine: WeightFiles -> its place in a fused tensor -> checksum             (file_channel.py)
    nccl, ipc           Learner.held, a part on each rank -> NcclChannel, IpcChannel: its part of a checksum, a bucket
                        -> GroupConnection or SharedBuffer
                        -> the engine: WeightReceiver -> its place in a fused tensor -> checksum        (direct_channel.py)

Version v+1 exists for the rest of the program only after publish() has returned. Silent corruption on the way is the
failure that costs people weeks, so nothing here is sampled or optional but the comparison's interval.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from marsrl.rollout.pool.replicas import Lost, Timed
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.runs.collective import barrier, rank
from marsrl.trainer.weights.checked_engines import CheckedEngines, Delivered
from marsrl.trainer.weights.comparison import ComparisonReport, TrainerScores, trainer_scores

_T = TypeVar("_T")

StandingBy = Callable[[Callable[[], "SyncReport"]], "SyncReport | None"]
"""Does rank 0's work, and on the other ranks what rank 0 asks of them meanwhile."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A publish that was verified.

    is_direct: without files (nccl, ipc).
    comparison: None where it was not due (sync.verify_every).
    seconds_of: `seconds` by part. Files: export (the trainer's tensors gathered), checksum (of what was sent), write, load
        (every engine), engine_checksum (the slowest engine's), probe (the comparison). nccl, ipc: load (sending, receiving
        and the checksums of what was sent, side by side), engine_checksum, replace (engines that were lost), probe.
    """

    version: int
    seconds: float
    num_bytes: int
    num_tensors: int
    comparison: ComparisonReport | None
    seconds_of: Mapping[str, float]
    is_direct: bool

    @property
    def metrics(self) -> dict[str, float]:
        """sync/* of metrics.jsonl."""
        found: dict[str, float] = {"sync/bytes": self.num_bytes, "sync/seconds": self.seconds}
        found["sync/direct"] = self.is_direct
        if self.comparison is not None:
            found |= {
                "sync/probe_diff_max": self.comparison.largest,
                "sync/probe_diff_median": self.comparison.median,
                "sync/probe_diff_share": self.comparison.share,
                "sync/probe_noise": self.comparison.noise,
                "sync/probe_tokens": self.comparison.num_tokens,
            }
        return found


class WeightChannel(ABC):
    """Publishes one policy's weights to its engines and verifies every publish. Made and used on all ranks together.

    channel = FileChannel(CheckedEngines(pool, vocab_size=64) if rank() == 0 else None, torch.bfloat16)
    report = channel.publish(learner, version=1)
    """

    is_direct: ClassVar[bool] = False

    def __init__(
        self,
        engines: CheckedEngines | None,
        dtype: torch.dtype,
        *,
        verify_every: int = 1,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """engines: None on ranks other than 0. dtype: what they compute in. verify_every: versions between comparisons.
        cache_dtype: of their keys and values, where it is another one.
        """
        self._engines, self._dtype, self._verify_every = engines, dtype, verify_every
        self._cache_dtype = cache_dtype

    def publish(
        self,
        learner: Learner,
        version: int,
        engines_at_rest: AbstractContextManager[None] = nullcontext(),  # noqa: B008  (it has no state)
        standing_by: StandingBy | None = None,
    ) -> SyncReport | None:
        """Give every engine the learner's weights as `version` and verify what arrived. Collective; None but on rank 0.

        engines_at_rest: rank 0's; in its body, which begins when the engines can take the weights, they decode nothing; it
            ends when the new weights are proven.
        standing_by: how rank 0 works while the others send weights to whom it names (Standby.during): to engines that take
            the place of lost ones. None: they do not.

        Raises:
            RuntimeError: the weights did not arrive, an engine holds other numbers than were sent (the tensors are
                named), or trainer and engine disagree on the log-probs (comparison.py).
            ValueError: the tensors of a layer do not come one after the other, or some are missing.
        """
        scores = trainer_scores(learner, self._dtype, self._cache_dtype) if version % self._verify_every == 0 else None
        clock = Clock()
        self._prepare(learner, version, clock)
        with engines_at_rest:
            barrier()  # they are, which may have taken rank 0 a while
            delivered = self._deliver(learner, version, clock)
            report = (standing_by or _alone)(lambda: self._proven(delivered, scores, version, clock))
        if report is not None:
            self._settle()
        return report

    def _proven(
        self, delivered: Delivered | None, scores: TrainerScores | None, version: int, clock: Clock
    ) -> SyncReport:
        """Rank 0's: every engine that serves holds what was sent, those too that were replaced, and computes what it should."""
        assert self._engines is not None and delivered is not None, "of rank 0"
        slowest_s = max((receipt.checksum_seconds for receipt in delivered.receipts.values()), default=0.0)
        clock.move("load", "engine_checksum", slowest_s)
        self._engines.check(delivered, version)
        with clock.of("replace") if delivered.lost else nullcontext():
            self._engines.pool.replace(delivered.lost)
        found: ComparisonReport | None = None
        if scores is not None:
            with clock.of("probe"):
                found = self._engines.compare(scores, version)
        num_tensors, seconds = len(delivered.expected[0]), clock.total
        return SyncReport(version, seconds, delivered.num_bytes, num_tensors, found, clock.seconds_of, self.is_direct)

    def send_again(self, learner: Learner, version: int, engine: int | None) -> Timed | Lost | None:
        """Send one engine the present weights once more. Collective; channels that leave a file are never asked."""
        raise NotImplementedError

    def _prepare(self, learner: Learner, version: int, clock: Clock) -> None:  # noqa: B027  (most have nothing to do)
        """Every rank, while the engines still decode."""

    @abstractmethod
    def _deliver(self, learner: Learner, version: int, clock: Clock) -> Delivered | None:
        """Every rank, while the engines are at rest; what they hold then, on rank 0."""

    def _settle(self) -> None:  # noqa: B027
        """Rank 0, once the version is proven."""

    @abstractmethod
    def close(self) -> None:
        """Remove files, leave connections; may be called twice."""


def _alone(work: Callable[[], SyncReport]) -> SyncReport | None:
    return work() if rank() == 0 else None


class Clock:
    """Seconds by part. A part that begins inside of another interrupts it."""

    def __init__(self) -> None:
        self.seconds_of: dict[str, float] = {}
        self._start = time.perf_counter()
        self._inside: list[float] = [0.0]  # of each open part, the seconds that went to parts inside of it

    @property
    def total(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds_of[part] = self.seconds_of.get(part, 0.0) + elapsed - self._inside.pop()
            self._inside[-1] += elapsed

    def move(self, part: str, to: str, seconds: float) -> None:
        """Book a share of one part under another."""
        seconds = min(seconds, self.seconds_of[part])
        self.seconds_of[part] -= seconds
        self.seconds_of[to] = self.seconds_of.get(to, 0.0) + seconds

    def timed(self, part: str, items: Iterator[_T]) -> Iterator[_T]:
        """The items; the time until each of them is there counts for `part`."""
        while True:
            with self.of(part):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
