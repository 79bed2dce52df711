"""An engine shard's end of a weight sync without files: buckets come from the trainer and go straight to the tensors in use.

receiver = WeightReceiver(device)
receiver.receive(plan, {"model.layers.0.self_attn.qkv_proj.weight": tensor, ...})     # the same call for every version
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from marsrl.rollout.weights.bucket_plan import Box, Piece, WeightBucket
from marsrl.rollout.weights.connections import (
    Connection,
    GroupConnection,
    Rendezvous,
    SharedBuffer,
)
from marsrl.rollout.weights.shard_layout import Place, ShardLayout


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a bucket: [rows, cols] numbers that go to `places`, each with the block's first row there, from `col` on."""

    rows: int
    cols: int
    col: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class IncomingBucket:
    """A bucket of trainer rank `source`."""

    source: int
    blocks: tuple[Block, ...]

    @property
    def num_elements(self) -> int:
        return sum(block.rows * block.cols for block in self.blocks)


@dataclass(frozen=True)
class ReceivePlan:
    """What one shard of an engine receives, in order, and where from. shapes: of the fused tensors that it is to hold.

    It goes to its engine with every version: some 20,000 blocks of a large model, which are pickled once.
    """

    rendezvous: Rendezvous
    shard: int
    buckets: tuple[IncomingBucket, ...]
    shapes: Mapping[str, tuple[int, ...]]

    def __reduce__(self) -> tuple[Callable[[bytes], ReceivePlan], tuple[bytes]]:
        return self._unpacked, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        return pickle.dumps((self.rendezvous, self.shard, self.buckets, self.shapes), pickle.HIGHEST_PROTOCOL)

    @classmethod
    def _unpacked(cls, data: bytes) -> ReceivePlan:
        return cls(*pickle.loads(data))


def receive_plan(
    rendezvous: Rendezvous, shard: int, layout: ShardLayout, buckets: Iterable[WeightBucket]
) -> ReceivePlan:
    """What a shard of this layout has to know of the plan. buckets: those that go to it."""
    incoming = [
        IncomingBucket(bucket.source, tuple(_block(layout, piece) for piece in bucket.pieces)) for bucket in buckets
    ]
    return ReceivePlan(rendezvous, shard, tuple(incoming), layout.shapes)


def _block(layout: ShardLayout, piece: Piece) -> Block:
    rows, cols = piece.box.shape
    col, places = placed(layout, piece.name, piece.box)
    return Block(rows, cols, col, places)


def placed(layout: ShardLayout, name: str, box: Box) -> tuple[int, tuple[Place, ...]]:
    """(first column, places with the first row) of a part of a shard's box of an HF tensor."""
    need = layout.needs[name]
    places = tuple(Place(place.fused, place.row + box.row - need.row) for place in layout.places[name])
    return box.col - need.col, places


def matrix(tensor: Tensor) -> Tensor:
    """The tensor as rows of its last dimension; a vector as one column. A view."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)


class WeightReceiver:
    """One engine shard's connection to the trainer, opened by the first plan of a session."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._connection: Connection | None = None
        self._session = ""

    @torch.no_grad()
    def receive(self, plan: ReceivePlan, targets: Mapping[str, Tensor]) -> None:
        """Receive every bucket of the plan and write it to the targets, which may hold more rows (padding) than is sent.

        Raises:
            ValueError: a target is missing or has another shape; nothing was received then.
            TransferBroken: the trainer did not send in time, or has given this engine up; the targets are a mix of two
                versions.
        """
        for name, shape in plan.shapes.items():
            held = tuple(targets[name].shape) if name in targets else None
            if held is None or held[1:] != tuple(shape[1:]) or held[0] < shape[0]:
                raise ValueError(f"weight sync: {name} is to be {tuple(shape)}, and the engine holds {held}")
        try:
            connection = self._opened(plan)
            for bucket in plan.buckets:
                flat = connection.receive(bucket.source, bucket.num_elements)
                for block, values in _cut(flat, bucket.blocks):
                    for place in block.places:
                        rows = matrix(targets[place.fused])[place.row : place.row + block.rows]
                        rows[:, block.col : block.col + block.cols].copy_(values)
                connection.release()
        except BaseException:
            self.close(is_broken=True)
            raise

    def close(self, *, is_broken: bool = False) -> None:
        """Give the connection up; the next plan opens another."""
        if self._connection is not None:
            self._connection.close(is_broken=is_broken)
        self._connection, self._session = None, ""

    def _opened(self, plan: ReceivePlan) -> Connection:
        if self._connection is None or self._session != plan.rendezvous.session:
            self.close(is_broken=True)  # another session: somebody of the old one is gone
            self._connection = open_shard(plan.rendezvous, plan.shard, self._device)
            self._session = plan.rendezvous.session
        return self._connection


def open_shard(rendezvous: Rendezvous, shard: int, device: torch.device) -> Connection:
    """The engine's end of the connection; waits for the trainer's.

    Twice as long as ranks wait for an engine: they may come to this one after they have given up another.
    """
    rendezvous = replace(rendezvous, timeout_s=2 * rendezvous.timeout_s)
    if rendezvous.kind == "nccl":
        return GroupConnection(rendezvous, rendezvous.num_ranks + shard, device)
    return SharedBuffer(rendezvous, shard, device, is_relay=False)


def _cut(flat: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
    at = 0
    for block in blocks:
        yield block, flat[at : at + block.rows * block.cols].view(block.rows, block.cols)
        at += block.rows * block.cols
