"""Rank 0 knows the batch; every data-parallel rank gets its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsrl.rollout.state import decode, encode
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack, plan_micro_batches
from marsrl.trainer.runs.collective import broadcast_bytes, world_size


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer update trains on. normaliser: the loss's denominator beside the sequences' weights, over all ranks."""

    sequences: tuple[TrainSequence, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class Work:
    """What rank 0 tells the others about one step of one policy: its updates, in order."""

    updates: tuple[MiniBatch, ...]

    @property
    def sequences(self) -> tuple[TrainSequence, ...]:
        """Those of all updates."""
        return tuple(sequence for update in self.updates for sequence in update.sequences)


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update as a rank does it: its micro-batches, and the normaliser over all ranks."""

    micro_batches: tuple[PackedBatch, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's place among the data-parallel ranks (ranks of one place get the same batches), and the packing rules.

    align: T of every micro-batch is a multiple of it.
    """

    data_rank: int
    data_size: int
    max_tokens: int
    align: int


def share(work: Work | None, place: Share) -> list[Update]:
    """This rank's packed micro-batches of every update. Collective; `work` is rank 0's, None elsewhere.

    Every rank gets the same number of micro-batches an update, as the collectives inside a forward pass need.
    """
    return [
        Update(tuple(micro_batches(update.sequences, place)), update.normaliser) for update in _broadcast(work).updates
    ]


def micro_batches(sequences: Sequence[TrainSequence], place: Share) -> list[PackedBatch]:
    """This rank's part of sequences that every rank already holds (supervised traces from a common seed)."""
    plan = plan_micro_batches([s.num_tokens for s in sequences], place.data_size, place.max_tokens)
    return [pack([sequences[i] for i in members], align=place.align) for members in plan[place.data_rank]]


def _broadcast(work: Work | None) -> Work:
    if world_size() == 1:
        assert work is not None, "share: one rank alone needs the batch"
        return work
    data = broadcast_bytes(encode(work) if work is not None else None)
    return work if work is not None else decode(Work, data)
