"""sync.backend=nccl and ipc: every rank sends its own shards straight to the engines' tensors, without files.

    rank 0            agreement -> plans to the engines -> (engines receive | all ranks send) -> sums of all ranks -> checksums
    other ranks       agreement .......................................... send ........... sums

No rank gathers anything: a rank packs what it holds, one bucket at a time. With CUDA IPC the rank on an engine's GPU (its
relay) also takes the others' buckets for that engine, one at a time, into the buffer that both map. What an engine must
hold in the end is known without putting it together: each rank adds up its parts' share of every checksum.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.pool.recovery import Lost
from marsrl.rollout.pool.replicas import Timed
from marsrl.rollout.state import decode, encode
from marsrl.rollout.weights.bucket_plan import Piece, WeightBucket, plan_buckets, plan_pieces
from marsrl.rollout.weights.checksum import block_sum, checksum_of_sum
from marsrl.rollout.weights.connections import (
    Connection,
    ConnectionKind,
    GroupConnection,
    Rendezvous,
    SharedBuffer,
    Site,
    relay_ranks,
    site_of,
)
from marsrl.rollout.weights.engine_shard import EngineShard
from marsrl.rollout.weights.receiver import ReceivePlan, placed, receive_plan
from marsrl.rollout.weights.shard_layout import ShardLayout, shard_layout
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.runs.collective import broadcast_bytes, gather_bytes, rank, world_size
from marsrl.trainer.weights.channel import Clock, WeightChannel
from marsrl.trainer.weights.checked_engines import CheckedEngines, Delivered

if TYPE_CHECKING:  # it imports megatron
    from marsrl.trainer.learner.megatron.convert import Converter

_T = TypeVar("_T")
_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What rank 0 tells the others once. shards: of all engines, one engine after the other."""

    rendezvous: Rendezvous
    shards: tuple[EngineShard, ...]


class DirectChannel(WeightChannel):
    """What nccl and ipc have in common: the plan, made at the first publish; packing; checksums of what was sent.

    An engine that fails half-way holds a mix of versions, and serves nothing. When one was lost since the last publish and
    replaced, everybody connects anew.
    """

    is_direct = True
    _kind: ClassVar[ConnectionKind]

    def __init__(
        self,
        engines: CheckedEngines | None,
        dtype: torch.dtype,
        *,
        verify_every: int = 1,
        cache_dtype: torch.dtype | None = None,
        bucket_bytes: int = 256 << 20,
        timeout_s: float = 600.0,
        host: str = "127.0.0.1",
    ) -> None:
        """host: rank 0's address, as engines reach it; of rank 0. timeout_s: what nobody answers for so long is an error."""
        super().__init__(engines, dtype, verify_every=verify_every, cache_dtype=cache_dtype)
        self._bucket_bytes, self._timeout_s, self._host = bucket_bytes, timeout_s, host
        self._server: dist.TCPStore | None = None
        self._connections: list[Connection] = []
        self._agreement: Agreement | None = None
        self._generation = 0  # of the engines, when that was made
        self._layouts: list[ShardLayout] = []
        self._pieces: list[Piece] = []
        self._buckets: list[WeightBucket] = []
        self._plans: list[ReceivePlan] = []
        self._buffer: Tensor | None = None

    def _deliver(self, learner: Learner, version: int, clock: Clock) -> Delivered | None:
        """The engines receive while the ranks send.

        Raises:
            RuntimeError: one side failed, or an engine shard or a rank did not answer within timeout_s.
            ValueError: the ranks' shards do not cover what an engine needs, or a bucket is smaller than a row.
        """
        with clock.of("load"):
            held = learner.held()
            if self._engines is None:
                self._agree(held)
                self._send(held)
                return None
            pool = self._engines.pool
            pool.stand_by()
            shards = self._engines.shards
            if pool.generation != self._generation:
                self._generation, self._agreement = pool.generation, None
            self._agree(held, [shard for of_engine in shards for shard in of_engine])
            updates = [WeightUpdate("", version, plans) for plans in _by_engine(self._receive_plans(), shards)]
            receipts, expected = _side_by_side(lambda: pool.update_weights(updates), lambda: self._send(held))
        num_elements = sum(torch.Size(shape).numel() for shape in held.hf_shapes.values())
        return Delivered(_by_engine(expected, shards), receipts, num_elements * self._dtype.itemsize)

    def send_again(self, learner: Learner, version: int, engine: int | None) -> Timed | Lost | None:
        """Send the present weights to one engine that was lost and replaced; what it answers. Collective; None but on rank 0.

        engine: rank 0's. Nobody else's connection is touched; the next publish makes new ones.
        """
        again = type(self)(
            None, self._dtype, bucket_bytes=self._bucket_bytes, timeout_s=self._timeout_s, host=self._host
        )
        held = learner.held()
        try:
            if self._engines is None or engine is None:
                again._agree(held)
                again._send(held)
                return None
            pool = self._engines.pool
            again._agree(held, self._engines.shards_of_each)
            update = WeightUpdate("", version, tuple(again._receive_plans()))
            return _side_by_side(lambda: _survived(pool.hand(engine, update)), lambda: again._send(held))[0]
        finally:
            again.close()

    def close(self, *, is_broken: bool = False) -> None:
        """Leave the connections; may be called twice. is_broken: end what is under way first."""
        for connection in self._connections:
            connection.close(is_broken=is_broken)
        self._connections.clear()
        self._server, self._buffer = None, None

    @abstractmethod
    def _connect(self, device: torch.device) -> None:
        """Meet the engines, which do the same; does nothing after the first time."""

    @abstractmethod
    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        """This rank's part in getting a bucket to its engine shard."""

    @property
    def _rendezvous(self) -> Rendezvous:
        assert self._agreement is not None, "_agree comes first"
        return self._agreement.rendezvous

    def _agree(self, held: Converter, shards: Sequence[EngineShard] = ()) -> None:
        """Make the same plan on all ranks where rank 0 has none; it knows the engines' shards. Collective."""
        told = None
        if rank() == 0:
            if self._agreement is None:
                self.close(is_broken=True)
            told = self._agreement or Agreement(self._new_rendezvous(len(shards)), tuple(shards))
        agreement = decode(Agreement, broadcast_bytes(encode(told) if told is not None else None))
        if agreement == self._agreement:
            return
        if rank() != 0:
            self.close(is_broken=True)
        self._agreement, self._plans = agreement, []
        layout_of = {shard: shard_layout(held.hf_shapes, shard) for shard in dict.fromkeys(agreement.shards)}
        self._layouts = [layout_of[shard] for shard in agreement.shards]
        self._pieces = plan_pieces(held.boxes_of_ranks(), [layout.needs for layout in self._layouts])
        self._buckets = plan_buckets(self._pieces, self._rendezvous.num_ranks, self._rendezvous.max_elements)

    def _new_rendezvous(self, num_shards: int) -> Rendezvous:
        timeout = timedelta(seconds=self._timeout_s)
        self._server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        return Rendezvous(
            secrets.token_hex(8), self._host, self._server.port, self._kind, world_size(), num_shards,
            str(self._dtype).removeprefix("torch."), max(1, self._bucket_bytes // self._dtype.itemsize), self._timeout_s,
        )  # fmt: skip

    def _receive_plans(self) -> list[ReceivePlan]:
        """What each engine shard has to know: the same at every publish, and made at the first after an agreement."""
        if not self._plans:
            self._plans = [
                receive_plan(self._rendezvous, shard, layout, self._buckets)
                for shard, layout in enumerate(self._layouts)
            ]
        return self._plans

    @torch.no_grad()
    def _send(self, held: Converter) -> list[dict[str, int]]:
        """Send this rank's part of every bucket; {fused tensor: checksum} that each engine shard must report."""
        with torch.cuda.device(held.device) if held.device.type == "cuda" else contextlib.nullcontext():
            try:
                self._connect(held.device)
                for bucket in self._buckets:
                    self._pass_on(bucket, held)
            except BaseException:
                self.close(is_broken=True)
                raise
            return self._expected(held)

    def _packed(self, bucket: WeightBucket, held: Converter, flat: Tensor | None = None) -> Tensor:
        """[bucket.num_elements], the bucket's pieces in the engines' dtype; in `flat`, or in this rank's buffer."""
        if flat is None:
            if self._buffer is None:
                longest = max(each.num_elements for each in self._buckets if each.source == rank())
                self._buffer = torch.empty(longest, dtype=self._dtype, device=held.device)
            flat = self._buffer[: bucket.num_elements]
        at = 0
        for piece in bucket.pieces:
            values = _part(piece, held)
            flat[at : at + values.numel()].view(values.shape).copy_(values)
            at += values.numel()
        return flat

    def _expected(self, held: Converter) -> list[dict[str, int]]:
        """The checksums of all shards; shards of one layout hold the same, so the first of each is computed."""
        assert self._agreement is not None
        shards = self._agreement.shards
        first = [shards.index(shard) for shard in shards]
        sums: dict[str, int] = {}
        for piece in self._pieces:
            if piece.source == rank() and first[piece.target] == piece.target:
                values = _part(piece, held).to(self._dtype)
                for key, row, col, matrix in self._places(piece):
                    sums[key] = (sums.get(key, 0) + block_sum(values, row, col, matrix)) % (1 << 64)
        total: dict[str, int] = {}
        for told in gather_bytes(encode(_Sums(sums))):
            for key, value in decode(_Sums, told).sums.items():
                total[key] = total.get(key, 0) + value
        return [
            {
                name: checksum_of_sum(total[f"{shard} {name}"], self._dtype, shape)
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


class NcclChannel(DirectChannel):
    """From every rank to every engine shard over one process group of them all; without CUDA it is gloo's."""

    _kind = "nccl"
    _group: GroupConnection

    def _connect(self, device: torch.device) -> None:
        if not self._connections:
            self._group = GroupConnection(self._rendezvous, rank(), device)
            self._connections.append(self._group)

    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        if bucket.source == rank():
            self._group.send(self._packed(bucket, held), bucket.target)


class IpcChannel(DirectChannel):
    """Through memory that an engine shard shares with the rank on its GPU, its relay; without CUDA it is a file's."""

    _kind = "ipc"
    _relays: Sequence[int] = ()  # the rank of each shard
    _shared: dict[int, SharedBuffer]  # of the shards that this rank is the relay of

    def close(self, *, is_broken: bool = False) -> None:
        super().close(is_broken=is_broken)
        self._relays = ()

    def _connect(self, device: torch.device) -> None:
        if self._relays:
            return
        rendezvous = self._rendezvous
        ranks = [decode(Site, told) for told in gather_bytes(encode(site_of(device)))]
        store = rendezvous.store()
        keys = [f"site{shard}" for shard in range(rendezvous.num_shards)]
        store.wait(keys, timedelta(seconds=rendezvous.timeout_s))
        self._relays = relay_ranks(ranks, [Site(*store.get(key).decode().split("\n")) for key in keys])
        self._shared = {}
        for shard, relay in enumerate(self._relays):
            if relay == rank():
                self._shared[shard] = SharedBuffer(rendezvous, shard, device, is_relay=True)
                self._connections.append(self._shared[shard])

    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        relay = self._relays[bucket.target]
        if relay == rank():
            slot = self._shared[bucket.target].slot(bucket.num_elements)
            if bucket.source == rank():
                self._packed(bucket, held, slot)
            else:
                dist.recv(slot.view(torch.uint8), bucket.source)
            self._shared[bucket.target].hand_over()
        elif bucket.source == rank():
            dist.send(self._packed(bucket, held).view(torch.uint8), relay)


def _part(piece: Piece, held: Converter) -> Tensor:
    """The piece's numbers [rows, columns], in the trainer's memory."""
    own, box = held.boxes_of_ranks()[rank()][piece.name], piece.box
    return held.matrix(piece.name)[box.row - own.row : box.row_end - own.row, box.col - own.col : box.col_end - own.col]


def _by_engine(items: Sequence[_T], shards: Sequence[Sequence[EngineShard]]) -> list[tuple[_T, ...]]:
    """Something for each shard of all engines, together for each engine."""
    rest = iter(items)
    return [tuple(itertools.islice(rest, len(of_engine))) for of_engine in shards]


def _survived(answer: Timed | Lost) -> Timed:
    if isinstance(answer, Lost):
        raise RuntimeError(
            f"weight sync: an engine that was lost and replaced was lost again while it got its weights ({answer.reason})"
        )
    return answer


@dataclass(frozen=True, slots=True)
class _Sums:
    sums: dict[str, int]


def _side_by_side(first: Callable[[], _T], second: Callable[[], _S]) -> tuple[_T, _S]:
    """Both results; the first error of either is raised at once, whatever the other still waits for."""
    found: dict[int, object] = {}
    errors: list[BaseException] = []
    changed = threading.Condition()

    def work(index: int, function: Callable[[], object]) -> None:
        try:
            value = function()
        except BaseException as error:  # raised by the caller's thread
            with changed:
                errors.append(error)
                changed.notify()
            return
        with changed:
            found[index] = value
            changed.notify()

    for index, function in enumerate((first, second)):
        threading.Thread(target=work, args=(index, function), name="marsrl-sync", daemon=True).start()
    with changed:
        changed.wait_for(lambda: errors or len(found) == 2)
    if errors:
        raise errors[0]
    return found[0], found[1]  # type: ignore[return-value]
