"""Rank 0 knows the batch; every data-parallel rank gets its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marsrl.rollout.state import decode, encode
from marsrl.trainer.data.packing import PackedBatch, TrainSequence, pack, plan_micro_batches
from marsrl.trainer.runs.collective import broadcast_bytes, world_size


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one optimizer update trains on: MiniBatch((sequence, another), normaliser=5120.0).

    normaliser: the loss's denominator beside the sequences' weights, over all ranks.
    """

    sequences: tuple[TrainSequence, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update as a rank does it: its micro-batches, and the normaliser over all ranks."""

    micro_batches: tuple[PackedBatch, ...]
    normaliser: float


@dataclass(frozen=True, slots=True)
class BatchShard:
    """Which part of a batch this rank packs (ranks of one data_rank get the same), and the packing rules.

    align: T of every micro-batch is a multiple of it.
    """

    data_rank: int
    data_size: int
    max_tokens: int
    align: int


def scatter(mini_batches: tuple[MiniBatch, ...] | None, shard: BatchShard) -> list[Update]:
    """This rank's packed micro-batches of every update. Collective; mini_batches are rank 0's, None elsewhere.

    Every rank gets the same number of micro-batches an update, as the collectives inside a forward pass need.
    """
    return [Update(tuple(micro_batches(each.sequences, shard)), each.normaliser) for each in _broadcast(mini_batches)]


def micro_batches(sequences: Sequence[TrainSequence], shard: BatchShard) -> list[PackedBatch]:
    """This rank's part of sequences that every rank already holds (supervised traces from a common seed)."""
    lengths, clips = [s.num_tokens for s in sequences], [s.clip for s in sequences]
    plan = plan_micro_batches(lengths, shard.data_size, shard.max_tokens, clips)
    return [pack([sequences[i] for i in members], align=shard.align) for members in plan[shard.data_rank]]


def _broadcast(mini_batches: tuple[MiniBatch, ...] | None) -> tuple[MiniBatch, ...]:
    if world_size() == 1:
        assert mini_batches is not None, "scatter: one rank alone needs the batch"
        return mini_batches
    data = broadcast_bytes(encode(mini_batches) if mini_batches is not None else None)
    return mini_batches if mini_batches is not None else decode(tuple[MiniBatch, ...], data)
