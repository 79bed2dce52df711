"""Rank 0 knows the batch; every data-parallel rank gets its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsrl.rollout.state import decode, encode
from marsrl.trainer.collective import broadcast_bytes, world_size
from marsrl.trainer.packing import PackedBatch, TrainSequence, pack, plan_micro_batches


@dataclass(frozen=True, slots=True)
class Work:
    """What rank 0 tells the others about one update of one policy."""

    sequences: tuple[TrainSequence, ...]
    num_tokens: int  # the loss's denominator, over all ranks


def share(work: Work | None, *, data_rank: int, data_size: int, max_tokens: int, align: int) -> tuple[list[PackedBatch], int]:
    """This rank's packed micro-batches and the global denominator. Collective over all ranks.

    Args:
        work: on rank 0; None elsewhere.
        data_rank, data_size: this rank's place among the data-parallel ranks; ranks of one place get the same batches.
        align: T of every micro-batch becomes a multiple of it.

    Every rank gets the same number of micro-batches, as the collectives inside a forward pass need.
    """
    work = _broadcast(work)
    plan = plan_micro_batches([s.num_tokens for s in work.sequences], data_size, max_tokens)
    mine = [pack([work.sequences[i] for i in members], align=align) for members in plan[data_rank]]
    return mine, work.num_tokens


def _broadcast(work: Work | None) -> Work:
    if world_size() == 1:
        assert work is not None, "share: one rank alone needs the batch"
        return work
    data = broadcast_bytes(encode(work) if work is not None else None)
    return work if work is not None else decode(Work, data)


def micro_batches_alone(sequences: Sequence[TrainSequence], *, data_rank: int, data_size: int, max_tokens: int, align: int) -> list[PackedBatch]:
    """Like `share` where every rank already holds the same sequences (supervised traces from a common seed)."""
    plan = plan_micro_batches([s.num_tokens for s in sequences], data_size, max_tokens)
    return [pack([sequences[i] for i in members], align=align) for members in plan[data_rank]]
