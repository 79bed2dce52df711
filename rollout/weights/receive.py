"""An engine shard's end of a weight sync without files: buckets come over a wire and go straight to the tensors in use.

receiver = Receiver(device)
receiver.take(feed, {"model.layers.0.self_attn.qkv_proj.weight": tensor, ...})     # the same call for every version
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.rollout.weights.shard_layout import Place, ShardLayout
from marsrl.rollout.weights.transfers import Box, Bucket, Piece
from marsrl.rollout.weights.wires import GroupWire, Meeting, SharedWire, Wire, site_of


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of a bucket: [rows, cols] numbers that go to `places`, each with the block's first row there, from `col` on."""

    rows: int
    cols: int
    col: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A bucket of trainer rank `source`."""

    source: int
    blocks: tuple[Block, ...]

    @property
    def num_elements(self) -> int:
        return sum(block.rows * block.cols for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Feed:
    """What one engine shard receives, in order, and where from. shapes: of the fused tensors that it is to hold."""

    meeting: Meeting
    shard: int
    arrivals: tuple[Arrival, ...]
    shapes: Mapping[str, tuple[int, ...]]


def feed_of(meeting: Meeting, shard: int, layout: ShardLayout, buckets: Sequence[Bucket]) -> Feed:
    """The part of the plan that a shard of this layout has to know."""
    arrivals = []
    for bucket in buckets:
        if bucket.target == shard:
            arrivals.append(Arrival(bucket.source, tuple(_block(layout, piece) for piece in bucket.pieces)))
    return Feed(meeting, shard, tuple(arrivals), layout.shapes)


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


class Receiver:
    """One engine shard's wire to the trainer, opened by the first feed of a session."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wire: Wire | None = None
        self._session = ""

    @torch.no_grad()
    def take(self, feed: Feed, targets: Mapping[str, Tensor]) -> None:
        """Receive every bucket of the feed and write it to the targets, which may hold more rows (padding) than is sent.

        Raises:
            ValueError: a target is missing or has another shape; nothing was received then.
            RuntimeError: the trainer did not send in time; the targets are a mix of two versions.
        """
        for name, shape in feed.shapes.items():
            held = tuple(targets[name].shape) if name in targets else None
            if held is None or held[1:] != tuple(shape[1:]) or held[0] < shape[0]:
                raise ValueError(f"weight sync: {name} is to be {tuple(shape)}, and the engine holds {held}")
        wire = self._opened(feed)
        try:
            for arrival in feed.arrivals:
                flat = wire.receive(arrival.source, arrival.num_elements)
                for block, values in _cut(flat, arrival.blocks):
                    for place in block.places:
                        rows = matrix(targets[place.fused])[place.row : place.row + block.rows]
                        rows[:, block.col : block.col + block.cols].copy_(values)
                wire.release()
        except BaseException:
            self.close(is_broken=True)
            raise

    def close(self, *, is_broken: bool = False) -> None:
        """Give the wire up; the next feed opens another."""
        if self._wire is not None:
            self._wire.close(is_broken=is_broken)
        self._wire, self._session = None, ""

    def _opened(self, feed: Feed) -> Wire:
        if self._wire is None or self._session != feed.meeting.session:
            self.close()
            self._wire, self._session = open_shard(feed.meeting, feed.shard, self._device), feed.meeting.session
        return self._wire


def open_shard(meeting: Meeting, shard: int, device: torch.device) -> Wire:
    """The engine's end of the wire; waits for the trainer's."""
    if meeting.kind == "nccl":
        return GroupWire(meeting, meeting.num_ranks + shard, device)
    site = site_of(device)
    meeting.store().set(f"site{shard}", f"{site.host}\n{site.gpu}")
    return SharedWire(meeting, shard, device, is_gate=False)


def _cut(flat: Tensor, blocks: Sequence[Block]) -> Iterator[tuple[Block, Tensor]]:
    at = 0
    for block in blocks:
        yield block, flat[at : at + block.rows * block.cols].view(block.rows, block.cols)
        at += block.rows * block.cols
