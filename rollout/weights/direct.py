"""sync.backend=nccl and ipc: every rank sends its part of the weights straight to the engines' tensors, without files.

    rank 0            agree -> plans to the engines -> (engines receive | all ranks send) -> sums of all ranks -> checksums
    other ranks       agree ................................................ send ........... sums
    engine shard                                       WeightReceiver.receive: bucket after bucket into its tensor

layout.py defines the order of buckets. No rank gathers weights: each rank packs its own part, one bucket at a time. An engine
that stores a tensor in another form (FP8) receives it into scratch memory, one portion (layout.py) at a time, and converts it.
With CUDA IPC, the rank on an engine's GPU (its relay) also receives the other ranks' buckets for that engine, one at a time, into
the shared buffer. An engine's expected checksums are computed without assembling its weights: each rank sums its own parts, and
the sums of all ranks are added.

If an engine is lost during a transfer, the transfer ends on all sides. The engine is replaced, all sides reconnect, and all
weights are sent again. Ranks cannot cancel sends to each other, so relays receive the remaining buckets and drop them.
"""

from __future__ import annotations

import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.rollout.state import decode, encode
from marsrl.rollout.weights.checksum import ShardSums
from marsrl.rollout.weights.connections import (
    Connection,
    ConnectionKind,
    GroupConnection,
    Rendezvous,
    SharedBuffer,
    TransferBroken,
    TransferStore,
    relay_ranks,
    site_of,
)
from marsrl.rollout.weights.delta import decode_delta, differs, encode_delta
from marsrl.rollout.weights.layout import (
    Box,
    EngineShard,
    Piece,
    ShardLayout,
    WeightBucket,
    plan_buckets,
    plan_pieces,
    portion_size,
    shard_layout,
    whole_box,
)

# The classes and functions below are used by engines.


@dataclass(frozen=True, slots=True)
class ReceivePlan:
    """Buckets that an engine shard receives, in order, with their sources.

    The plan is encoded once, and sent to the engine with every version (WeightUpdate.receive_plans). number: index of the shard
    among the shards of all engines. shapes: shapes of the whole model, with stacks for experts (layout.py).
    """

    rendezvous: Rendezvous
    number: int
    shard: EngineShard
    shapes: Mapping[str, tuple[int, ...]]
    buckets: tuple[WeightBucket, ...]


class Converted(Protocol):
    """Weight that an engine converts when it receives it, for example to FP8.

    shape: shape of the fused tensor that the ranks send.
    """

    shape: tuple[int, ...]

    def write(self, first: int, weight: Tensor) -> None:
        """Convert whole matrices [matrices, rows, columns] of the weight, and write them from matrix `first` on."""


class WeightReceiver:
    """One engine shard's connection to the trainer, opened by the first plan of a session.

    receiver = WeightReceiver(device)
    receiver.receive(plan, {"model.layers.0.self_attn.qkv_proj.weight": tensor, ...}.get)     # the same call for every version
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._connection: Connection | None = None
        self._session = ""

    @torch.no_grad()
    def receive(
        self, plan: ReceivePlan, target: Callable[[str], Tensor | Converted | None]
    ) -> Mapping[str, tuple[int, ...]]:
        """Receive every bucket of the plan and write it to the targets; return {fused tensor: shape}.

        target: takes the name of a fused tensor, and returns the engine's tensor or Converted weight, or None if the engine has
            neither. A target may have more rows (padding) than are sent. A Converted weight needs scratch memory for a bucket at
            most, or for one matrix if that is larger.

        Raises:
            ValueError: a target is missing or has a wrong shape; nothing was received.
            TransferBroken: the transfer was aborted; the targets are a mix of two versions.
        """
        layout, targets = shard_layout(plan.shapes, plan.shard), dict[str, Tensor | _Scratch]()
        for name, shape in layout.shapes.items():
            weight = target(name)
            held = None if weight is None else tuple(weight.shape)
            if weight is None or held is None or held[1:] != shape[1:] or held[0] < shape[0]:
                raise ValueError(
                    f"weight sync: {name} has shape {held} in the engine; expected {shape}, with as many rows or more"
                )
            targets[name] = weight if isinstance(weight, Tensor) else _Scratch(weight, plan.rendezvous, self._device)
        try:
            connection = self._opened(plan)
            for bucket in plan.buckets:
                message = _next_message(connection, bucket, plan.rendezvous)
                _write(message, bucket, plan.rendezvous, list(_boxes(bucket, layout, targets)))
                connection.release()
                for name in {fused for piece in bucket.pieces for fused, _ in layout.places[piece.name]}:
                    if isinstance(scratch := targets[name], _Scratch):
                        scratch.convert()
        except BaseException:
            self.close(is_broken=True)
            raise
        return layout.shapes

    def close(self, *, is_broken: bool = False) -> None:
        """Close the connection; the next plan opens another."""
        if self._connection is not None:
            self._connection.close(is_broken=is_broken)
        self._connection, self._session = None, ""

    def _opened(self, plan: ReceivePlan) -> Connection:
        rendezvous = plan.rendezvous
        if self._connection is None or self._session != rendezvous.session:
            self.close(is_broken=True)  # a new session begins when a member of the old one is lost
            store = TransferStore(rendezvous)
            if rendezvous.kind == "nccl":
                self._connection = GroupConnection(store, rendezvous.num_ranks + plan.number, self._device)
            else:
                self._connection = SharedBuffer(store, plan.number, self._device, is_relay=False)
            self._session = rendezvous.session
        return self._connection


class _Scratch:
    """Scratch memory for portions of a Converted weight. A portion has memory from its first piece until it is complete."""

    def __init__(self, weight: Converted, rendezvous: Rendezvous, device: torch.device) -> None:
        self._weight, self._device, self._dtype = weight, device, rendezvous.torch_dtype
        self._step = portion_size(weight.shape, rendezvous.max_elements)
        self._whole = whole_box(weight.shape)
        self._begun: dict[int, Tensor] = {}  # scratch memory of incomplete portions, by first matrix of the portion
        self._missing: dict[int, int] = {}  # number of elements that each portion still lacks, by first matrix

    def of(self, box: Box) -> Tensor:
        """Return the scratch memory of a box, which lies in one portion. The caller must write all of its elements."""
        first = box.start[0] // self._step * self._step
        portion = self._whole.cut(0, first, first + self._step).overlap(self._whole)
        if first not in self._begun:
            self._begun[first] = torch.empty(portion.shape, dtype=self._dtype, device=self._device)
            self._missing[first] = portion.num_elements
        self._missing[first] -= box.num_elements
        return box.within(portion).of(self._begun[first])

    def convert(self) -> None:
        """Write complete portions to the weight, and free their memory."""
        for first in [first for first, number in self._missing.items() if not number]:
            del self._missing[first]
            self._weight.write(first, self._begun.pop(first))


def _next_message(connection: Connection, bucket: WeightBucket, rendezvous: Rendezvous) -> Tensor:
    """Return a message [bytes] uint8: the bucket, or a delta of it."""
    num_bytes = bucket.num_elements * rendezvous.torch_dtype.itemsize
    if rendezvous.sends_deltas:
        num_bytes = int(connection.receive(bucket.source, 8).view(torch.int64))
    return connection.receive(bucket.source, num_bytes)


def _boxes(
    bucket: WeightBucket, layout: ShardLayout, targets: Mapping[str, Tensor | _Scratch]
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first, end, view): elements first to end of the bucket belong in this view of a target.

    Views are [matrices, rows, columns]. A tied embedding has two targets.
    """
    end = 0
    for piece in bucket.pieces:
        first, end = end, end + piece.box.num_elements
        for fused, place in layout.placed(piece.name, piece.box):
            target = targets[fused]
            yield first, end, place.of(target) if isinstance(target, Tensor) else target.of(place)


def _write(
    message: Tensor, bucket: WeightBucket, rendezvous: Rendezvous, boxes: Sequence[tuple[int, int, Tensor]]
) -> None:
    """Write a message to the boxes; a delta leaves other values unchanged."""
    dtype = rendezvous.torch_dtype
    if len(message) == bucket.num_elements * dtype.itemsize:
        for first, end, box in boxes:
            box.copy_(message.view(dtype)[first:end].view(box.shape))
        return
    places, values = decode_delta(message, bucket.num_elements, dtype)
    bounds = torch.tensor([(first, end) for first, end, _ in boxes], device=message.device)
    for (first, _, box), (low, high) in zip(boxes, torch.searchsorted(places, bounds).tolist(), strict=True):
        inside = places[low:high] - first
        box[torch.unravel_index(inside, box.shape)] = values[low:high].to(box.dtype)


# The classes below are used by the trainer's ranks.


class HeldWeights(Protocol):
    """A trainer rank's part of the weights (Learner.held)."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each HF tensor of the model. Tensors of experts are replaced by stacks (layout.py)."""

    @property
    def device(self) -> torch.device: ...

    @property
    def boxes_of_ranks(self) -> Sequence[Mapping[str, Box]]:
        """For each rank, {tensor: the box of it that the rank holds}."""

    def stack(self, name: str) -> Tensor:
        """Return this rank's box of a tensor, [matrices, rows, columns]; while the trainer's memory sleeps, on the CPU."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The trainer's ranks, seen from one rank.

    broadcast: returns rank 0's bytes on every rank. gather: returns all ranks' bytes.
    """

    rank: int
    size: int
    broadcast: Callable[[bytes | None], bytes]
    gather: Callable[[bytes], list[bytes]]


@dataclass(slots=True)
class Traffic:
    """Statistics of a transfer.

    num_bytes: bytes sent, not counting the lengths that precede messages. whole_bytes: size of all weights in bytes.
    num_changed, num_compared: numbers of changed and of compared elements; 0 if everything was sent without a comparison.
    """

    num_bytes: int = 0
    whole_bytes: int = 0
    num_changed: int = 0
    num_compared: int = 0

    def add(self, other: Traffic) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class _Sent:
    """One rank's report on a transfer.

    totals: its part of the checksums of each distinct shard. has_all: True if the transfer has not broken on this rank.
    """

    totals: list[dict[str, int]]
    has_all: bool
    traffic: Traffic


class DirectSender(ABC):
    """One rank's side of transfers to engines. All ranks call agree and send together.

    sender.agree(held, shards)      when engines have changed, or a transfer has broken
    sender.plans                    on rank 0: the encoded ReceivePlan of each shard, for the engines
    expected = sender.send(held)    {fused tensor: checksum} of each shard, once all have received
    """

    kind: ClassVar[ConnectionKind]

    def __init__(
        self,
        ranks: Ranks,
        dtype: torch.dtype,
        *,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 600.0,
        host: str = "127.0.0.1",
        sends_deltas: bool = False,
    ) -> None:
        """Create the sender. host: rank 0's address for engines; used on rank 0. timeout_s: time limit of a wait."""
        self.sends_deltas = sends_deltas
        self._ranks, self._dtype = ranks, dtype
        self._max_elements = bucket_bytes // dtype.itemsize  # elements of a bucket
        self._timeout_s, self._host = timeout_s, host
        self.plans: list[bytes] = []
        self.traffic = Traffic()
        """Statistics of the last transfer, all ranks together."""
        self._shards: tuple[EngineShard, ...] = ()  # shards of all engines, one engine after the other
        self._layouts: dict[EngineShard, ShardLayout] = {}
        self._store: TransferStore | None = None
        self._connections: dict[int, Any] = {}
        self._is_broken = False
        self._pieces: list[Piece] = []
        self._buckets: list[WeightBucket] = []
        self._buffer: Tensor | None = None

    def agree(self, held: HeldWeights, shards: Sequence[EngineShard] = ()) -> None:
        """Make the same plan on all ranks. Collective.

        shards: on rank 0, the shards of all engines; (): keep the current plan. Ignored on other ranks.

        Raises ValueError: the ranks' parts do not cover an engine's needs, or a bucket is smaller than a row.
        """
        message, server = None, None
        if self._ranks.rank == 0:
            message = b""
            if shards:
                timeout = timedelta(seconds=self._timeout_s)
                server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
                rendezvous = Rendezvous(
                    secrets.token_hex(8), self._host, server.port, self.kind, self._ranks.size, len(shards),
                    str(self._dtype).removeprefix("torch."), self._max_elements, self._timeout_s,
                    self.sends_deltas,
                )  # fmt: skip
                message = encode((rendezvous, tuple(shards)))
        message = self._ranks.broadcast(message)
        if not message:
            return
        self.close(is_broken=True)
        rendezvous, self._shards = decode(tuple[Rendezvous, tuple[EngineShard, ...]], message)
        self._store, self._is_broken = TransferStore(rendezvous, server), False
        self._layouts = {shard: shard_layout(held.shapes, shard) for shard in dict.fromkeys(self._shards)}
        self._pieces = plan_pieces(held.boxes_of_ranks, [self._layouts[shard].needs for shard in self._shards])
        layouts = [self._layouts[shard] for shard in self._shards]
        self._buckets = plan_buckets(self._pieces, layouts, self._ranks.size, self._max_elements)
        if self._ranks.rank == 0:
            buckets_to: list[list[WeightBucket]] = [[] for _ in self._shards]
            for bucket in self._buckets:
                buckets_to[bucket.target].append(bucket)
            self.plans = [
                encode(ReceivePlan(rendezvous, number, shard, held.shapes, tuple(buckets_to[number])))
                for number, shard in enumerate(self._shards)
            ]

    def give_up(self, reason: str) -> None:
        """End all waits for engines; callable on any rank, in any thread."""
        assert self._store is not None, "call agree first"
        self._store.give_up(reason)

    @torch.no_grad()
    def send(self, held: HeldWeights) -> list[dict[str, int]]:
        """Send this rank's part of every bucket. Collective.

        Returns the {fused tensor: checksum} expected of each engine shard; empty if the transfer has broken.
        """
        assert self._store is not None, "call agree first"
        self.traffic = Traffic()
        with torch.cuda.device(held.device) if held.device.type == "cuda" else contextlib.nullcontext():
            try:
                with self._unless_broken():
                    self._connect(self._store, held.device)
                for bucket in self._buckets:
                    self._pass_on(bucket, held)
            except BaseException:
                self.close(is_broken=True)
                raise
            return self._expected(held)

    def close(self, *, is_broken: bool = False) -> None:
        """Close the connections; may be called twice. is_broken: abort pending transfers first."""
        for connection in self._connections.values():
            connection.close(is_broken=is_broken)
        self._connections.clear()
        self._store, self._buffer = None, None

    @abstractmethod
    def _connect(self, store: TransferStore, device: torch.device) -> None:
        """Connect to the engines, which connect at the same time; a no-op after the first time."""

    @abstractmethod
    def _pass_on(self, bucket: WeightBucket, held: HeldWeights) -> None:
        """Do this rank's part in moving a bucket to its engine shard."""

    @contextlib.contextmanager
    def _unless_broken(self) -> Iterator[None]:
        """Leave the block if the transfer breaks; engines then get no more buckets."""
        try:
            yield
        except TransferBroken:  # not re-raised: the engines report the reason
            self._is_broken = True

    def _packed(self, bucket: WeightBucket, held: HeldWeights, flat: Tensor | None = None) -> Tensor:
        """Pack the bucket's pieces in the engines' dtype, [bucket.num_elements], into `flat` or this rank's buffer."""
        if flat is None:
            if self._buffer is None:
                longest = max(each.num_elements for each in self._buckets if each.source == self._ranks.rank)
                self._buffer = torch.empty(longest, dtype=self._dtype, device=held.device)
            flat = self._buffer[: bucket.num_elements]
        at = 0
        for piece in bucket.pieces:
            values = self._part(piece, held, held.stack)
            flat[at : at + values.numel()].view(values.shape).copy_(values)
            at += values.numel()
        return flat

    def _part(self, piece: Piece, held: HeldWeights, stack_of: Callable[[str], Tensor]) -> Tensor:
        """Return a view [matrices, rows, columns] of a piece in this rank's part of a tensor."""
        return piece.box.within(held.boxes_of_ranks[self._ranks.rank][piece.name]).of(stack_of(piece.name))

    def _expected(self, held: HeldWeights) -> list[dict[str, int]]:
        """Return the checksums of all shards. Equal shards hold the same weights, so only the first of them is summed."""
        sums = {shard: ShardSums(layout, self._dtype) for shard, layout in self._layouts.items()}
        for piece in self._pieces:
            shard = self._shards[piece.target]
            if piece.source == self._ranks.rank and self._shards.index(shard) == piece.target:
                sums[shard].add(piece.name, piece.box, self._part(piece, held, held.stack).to(held.device))
        mine = _Sent([each.totals for each in sums.values()], not self._is_broken, self.traffic)
        parts = [decode(_Sent, each) for each in self._ranks.gather(encode(mine))]
        self.traffic = Traffic()
        for sent in parts:
            self.traffic.add(sent.traffic)
        if not all(each.has_all for each in parts):
            return []
        del parts[self._ranks.rank]  # leave out this rank's own sums
        for others in parts:
            for each, totals in zip(sums.values(), others.totals, strict=True):
                each.merge(totals)
        checksums = {shard: each.checksums() for shard, each in sums.items()}
        return [checksums[shard] for shard in self._shards]


class GroupSender(DirectSender):
    """Sender from every rank to every engine shard, over a process group of all of them (gloo without CUDA).

    With deltas a rank keeps a second copy of its weights, as last sent, in the engines' dtype. Engines that have just
    connected get all weights.
    """

    kind = "nccl"
    _last: dict[str, Tensor]  # weights as last sent, by name; empty if the engines' weights are unknown

    @torch.no_grad()
    def send(self, held: HeldWeights) -> list[dict[str, int]]:
        expected = super().send(held)
        if self.sends_deltas and expected:
            for name in {piece.name for piece in self._pieces if piece.source == self._ranks.rank}:
                if name in self._last:
                    self._last[name].copy_(held.stack(name))
                else:
                    self._last[name] = held.stack(name).to(self._dtype, copy=True)
        return expected

    def close(self, *, is_broken: bool = False) -> None:
        super().close(is_broken=is_broken)
        self._last = {}

    def _connect(self, store: TransferStore, device: torch.device) -> None:
        if not self._connections:
            self._connections[0] = GroupConnection(store, self._ranks.rank, device)

    def _pass_on(self, bucket: WeightBucket, held: HeldWeights) -> None:
        if bucket.source != self._ranks.rank or self._is_broken:
            return
        flat, to = self._packed(bucket, held), bucket.target
        message = self._delta(bucket, held, flat) if self._last else flat
        with self._unless_broken():
            if self.sends_deltas:
                self._connections[0].send(torch.tensor([message.nbytes], device=flat.device), to)
            self._connections[0].send(message, to)
        self.traffic.add(Traffic(message.nbytes, flat.nbytes))

    def _delta(self, bucket: WeightBucket, held: HeldWeights, flat: Tensor) -> Tensor:
        """Return the message for a bucket: its changed elements, or all of them (`flat`) if that is shorter."""
        masks, at = [], 0
        for piece in bucket.pieces:
            last = self._part(piece, held, self._last.__getitem__)
            masks.append(differs(flat[at : at + last.numel()].view(last.shape), last).view(-1))
            at += last.numel()
        changed = torch.cat(masks)
        num_changed = int(changed.count_nonzero())
        self.traffic.add(Traffic(num_changed=num_changed, num_compared=len(flat)))
        message = encode_delta(flat, changed, num_changed)
        return flat if message is None else message


class SharedSender(DirectSender):
    """Sender through memory that each engine shard shares with its relay, a rank on its GPU (without CUDA: a file)."""

    kind = "ipc"
    _relays: Sequence[int] = ()  # rank of each shard's relay; empty before _connect, or if the transfer broke in it

    def close(self, *, is_broken: bool = False) -> None:
        super().close(is_broken=is_broken)
        self._relays = ()

    def _connect(self, store: TransferStore, device: torch.device) -> None:
        if self._relays:
            return
        ranks = [site.decode() for site in self._ranks.gather(site_of(device).encode())]
        sites = None
        if self._ranks.rank == 0:  # only rank 0 reads the sites, so that the transfer breaks on all ranks or on none
            sites = b""
            with self._unless_broken():
                sites = "\n".join(store.get(f"site{shard}") for shard in range(len(self._shards))).encode()
        self._relays = relay_ranks(ranks, self._ranks.broadcast(sites).decode().splitlines())
        for target, relay in enumerate(self._relays):
            if relay == self._ranks.rank:
                self._connections[target] = SharedBuffer(store, target, device, is_relay=True)

    def _pass_on(self, bucket: WeightBucket, held: HeldWeights) -> None:
        if not self._relays:
            return
        relay = self._relays[bucket.target]
        if relay == self._ranks.rank:
            shared = self._connections[bucket.target]
            slot = shared.slot(bucket.num_elements)
            if bucket.source == self._ranks.rank:
                self._packed(bucket, held, slot)
            else:
                dist.recv(slot.view(torch.uint8), bucket.source)
            if not self._is_broken:
                with self._unless_broken():
                    shared.hand_over()
        elif bucket.source == self._ranks.rank:
            dist.send(self._packed(bucket, held).view(torch.uint8), relay)
