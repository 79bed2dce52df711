"""The trainer's end of a weight sync without files: every rank sends its own shards straight to the engines' tensors.

    rank 0            session -> feeds to the engines -> (engines receive | all ranks send) -> sums of all ranks -> checksums
    other ranks       session ........................................... send ........... sums

No rank gathers anything: a rank packs what it holds, one bucket at a time. With CUDA IPC the rank on an engine's GPU (its
gate) also takes the others' buckets for that engine, one at a time, into the buffer that both map. What an engine must
hold in the end is known without putting it together: each rank adds up its parts' share of every checksum.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.rollout.state import decode, encode
from marsrl.rollout.weights.checksum import block_sum, checksum_of_sum
from marsrl.rollout.weights.receive import Feed, feed_of, placed
from marsrl.rollout.weights.shard_layout import ShardLayout, shard_layout
from marsrl.rollout.weights.transfers import Box, Bucket, Piece, plan_buckets, plan_pieces
from marsrl.rollout.weights.wires import GroupWire, Meeting, SharedWire, Site, WireKind, gate_ranks, site_of
from marsrl.trainer.runs.collective import broadcast_bytes, gather_bytes, rank, world_size


class HeldWeights(Protocol):
    """One policy's weights, as far as this rank holds them (Converter)."""

    @property
    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def boxes_of_ranks(self) -> Sequence[Mapping[str, Box]]:
        """What each rank holds of each tensor."""

    def matrix(self, name: str) -> Tensor:
        """This rank's box of a tensor."""


@dataclass(frozen=True, slots=True)
class WireOptions:
    """host: rank 0's address, as engines reach it. timeout_s: what nobody answers for so long is an error."""

    kind: WireKind
    bucket_bytes: int = 256 << 20
    timeout_s: float = 600.0
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Session:
    """What rank 0 tells the others once. shards: (part, parts) of each engine shard."""

    meeting: Meeting
    shards: tuple[tuple[int, int], ...]


class WireSender:
    """This rank's part in every publish of one policy. `open` and `send` are collective over the trainer's ranks.

    sender.open(learner.held(), dtype="bfloat16", shards=[(0, 1)] * num_engines)
    checksums = sender.send()          # while the engines take sender.feeds()
    """

    def __init__(self, options: WireOptions) -> None:
        self._options = options
        self._weights: HeldWeights
        self._server: dist.TCPStore | None = None
        self._session: Session | None = None
        self._layouts: list[ShardLayout] = []
        self._pieces: list[Piece] = []
        self._buckets: list[Bucket] = []
        self._group: GroupWire | None = None
        self._shared: dict[int, SharedWire] = {}  # of the shards that this rank is the gate of
        self._gates: list[int] = []
        self._buffer: Tensor | None = None

    def open(self, weights: HeldWeights, dtype: str = "", shards: Sequence[tuple[int, int]] = ()) -> None:
        """Take the weights that `send` sends; agree on the plan, the first time. Rank 0 knows the engines' dtype and shards.

        Raises:
            ValueError: the ranks' shards do not cover what an engine needs, or a bucket is smaller than a row.
        """
        self._weights = weights
        if self._session is not None:
            return
        told = encode(self._new_session(dtype, shards)) if rank() == 0 else None
        self._session = decode(Session, broadcast_bytes(told))
        meeting = self._session.meeting
        shapes, heads = self._weights.hf_shapes, self._weights.num_kv_heads
        self._layouts = [
            shard_layout(shapes, num_kv_heads=heads, part=part, parts=parts) for part, parts in self._session.shards
        ]
        self._pieces = plan_pieces(self._weights.boxes_of_ranks(), [layout.needs for layout in self._layouts])
        self._buckets = plan_buckets(self._pieces, meeting.num_ranks, meeting.max_elements)

    def feeds(self) -> list[Feed]:
        """What each engine shard has to know."""
        meeting = self._opened.meeting
        return [feed_of(meeting, shard, layout, self._buckets) for shard, layout in enumerate(self._layouts)]

    @property
    def num_bytes(self) -> int:
        """Of the whole model, in the engines' dtype."""
        shapes = self._weights.hf_shapes.values()
        return sum(torch.Size(shape).numel() for shape in shapes) * self._opened.meeting.torch_dtype.itemsize

    @torch.no_grad()
    def send(self) -> list[dict[str, int]]:
        """Send this rank's part of every bucket; {fused tensor: checksum} that each engine shard must report.

        Raises:
            RuntimeError: an engine shard or a rank did not answer within timeout_s.
        """
        with (
            torch.cuda.device(self._weights.device) if self._weights.device.type == "cuda" else contextlib.nullcontext()
        ):
            try:
                self._connect()
                for bucket in self._buckets:
                    if self._group is not None:
                        if bucket.source == rank():
                            self._group.send(self._packed(bucket, self._flat(bucket)), bucket.target)
                    else:
                        self._pass_on(bucket)
            except BaseException:
                self.close(is_broken=True)
                raise
            return self._expected()

    def close(self, *, is_broken: bool = False) -> None:
        """Give up the wires; may be called twice."""
        for wire in (self._group, *self._shared.values()):
            if wire is not None:
                wire.close(is_broken=is_broken)
        self._group, self._server, self._buffer = None, None, None
        self._shared.clear()

    @property
    def _opened(self) -> Session:
        assert self._session is not None, "WireSender.open comes first"
        return self._session

    def _new_session(self, dtype: str, shards: Sequence[tuple[int, int]]) -> Session:
        options = self._options
        timeout = timedelta(seconds=options.timeout_s)
        self._server = dist.TCPStore(options.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        size = getattr(torch, dtype).itemsize
        meeting = Meeting(
            secrets.token_hex(8), options.host, self._server.port, options.kind, world_size(), len(shards), dtype,
            max(1, options.bucket_bytes // size), options.timeout_s,
        )  # fmt: skip
        return Session(meeting, tuple(shards))

    def _connect(self) -> None:
        """Open the wires with the engines, which do the same; the first time only."""
        meeting, device = self._opened.meeting, self._weights.device
        if meeting.kind == "nccl":
            self._group = self._group or GroupWire(meeting, rank(), device)
            return
        if not self._gates:
            ranks = [decode(Site, told) for told in gather_bytes(encode(site_of(device)))]
            store = meeting.store()
            keys = [f"site{shard}" for shard in range(meeting.num_shards)]
            store.wait(keys, timedelta(seconds=meeting.timeout_s))
            shards = [Site(*store.get(key).decode().split("\n")) for key in keys]
            self._gates = gate_ranks(ranks, shards)
            for shard, gate in enumerate(self._gates):
                if gate == rank():
                    self._shared[shard] = SharedWire(meeting, shard, device, is_gate=True)

    def _pass_on(self, bucket: Bucket) -> None:
        """A bucket by way of its engine's gate."""
        gate = self._gates[bucket.target]
        if gate == rank():
            slot = self._shared[bucket.target].slot(bucket.num_elements)
            if bucket.source == rank():
                self._packed(bucket, slot)
            else:
                dist.recv(slot.view(torch.uint8), bucket.source)
            self._shared[bucket.target].hand_over()
        elif bucket.source == rank():
            dist.send(self._packed(bucket, self._flat(bucket)).view(torch.uint8), gate)

    def _flat(self, bucket: Bucket) -> Tensor:
        """This rank's buffer for what it sends, as long as the bucket."""
        meeting = self._opened.meeting
        if self._buffer is None:
            longest = max(each.num_elements for each in self._buckets if each.source == rank())
            self._buffer = torch.empty(longest, dtype=meeting.torch_dtype, device=self._weights.device)
        return self._buffer[: bucket.num_elements]

    def _packed(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """`flat` [bucket.num_elements], filled with the bucket's pieces, in the engines' dtype."""
        at = 0
        for piece in bucket.pieces:
            values = self._part(piece)
            flat[at : at + values.numel()].view(values.shape).copy_(values)
            at += values.numel()
        return flat

    def _part(self, piece: Piece) -> Tensor:
        held = self._weights.boxes_of_ranks()[rank()][piece.name]
        box = piece.box
        return self._weights.matrix(piece.name)[
            box.row - held.row : box.row_end - held.row, box.col - held.col : box.col_end - held.col
        ]

    def _expected(self) -> list[dict[str, int]]:
        """The checksums of all shards; shards of one layout hold the same, so the first of each is computed."""
        session = self._opened
        dtype = session.meeting.torch_dtype
        first = [session.shards.index(shard) for shard in session.shards]
        sums: dict[str, int] = {}
        for piece in self._pieces:
            if piece.source == rank() and first[piece.target] == piece.target:
                values = self._part(piece).to(dtype)
                for key, row, col, matrix in self._places(piece):
                    sums[key] = (sums.get(key, 0) + block_sum(values, row, col, matrix)) % (1 << 64)
        total: dict[str, int] = {}
        for told in gather_bytes(encode(_Sums(sums))):
            for key, value in decode(_Sums, told).sums.items():
                total[key] = total.get(key, 0) + value
        return [
            {
                name: checksum_of_sum(total[f"{shard} {name}"], dtype, shape)
                for name, shape in self._layouts[shard].shapes.items()
            }
            for shard in first
        ]

    def _places(self, piece: Piece) -> Iterator[tuple[str, int, int, tuple[int, int]]]:
        """(key of the sum, row, column, shape of the fused tensor as a matrix) for each place of a piece."""
        layout = self._layouts[piece.target]
        col, places = placed(layout, piece.name, piece.box)
        for place in places:
            shape = torch.Size(layout.shapes[place.fused])
            num_cols = shape[-1] if len(shape) > 1 else 1
            yield f"{piece.target} {place.fused}", place.row, col, (shape.numel() // num_cols, num_cols)


@dataclass(frozen=True, slots=True)
class _Sums:
    sums: dict[str, int]
