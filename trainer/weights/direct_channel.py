"""sync.backend=nccl and ipc: every rank sends its own shards straight to the engines' tensors, without files.

    rank 0            agreement -> plans to the engines -> (engines receive | all ranks send) -> sums of all ranks -> checksums
    other ranks       agreement .......................................... send ........... sums

No rank gathers anything: a rank packs what it holds, one bucket at a time. With CUDA IPC the rank on an engine's GPU (its
relay) also takes the others' buckets for that engine, one at a time, into the buffer that both map. What an engine must
hold in the end is known without putting it together: each rank adds up its parts' share of every checksum.

An engine that is lost on the way gets nothing more, from any rank, and the others get all of theirs. The one that takes its
place gets the weights from all ranks alone (send_again), while they stand by (standby.py). Ranks never take back what they
send to each other: a relay takes buckets for a lost engine, too, and drops them.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from marsrl.rollout.engines.protocol import WeightUpdate
from marsrl.rollout.pool.pool import EnginePool
from marsrl.rollout.pool.replicas import Lost, Timed
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
    StoreClients,
    TransferBroken,
    TransferStore,
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
    """What rank 0 tells the others once. engines: where each is met; shards: of all of them, one engine after the other."""

    engines: tuple[Rendezvous, ...]
    shards: tuple[EngineShard, ...]


class DirectChannel(WeightChannel):
    """What nccl and ipc have in common: the plan, made at the first publish; packing; checksums of what was sent.

    An engine that fails half-way holds a mix of versions, and serves nothing: it is lost. When one was lost since the last
    publish began, everybody connects anew.
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
        """host: rank 0's address, as engines reach it; of rank 0. timeout_s: who does not answer for so long is given up."""
        super().__init__(engines, dtype, verify_every=verify_every, cache_dtype=cache_dtype)
        self._bucket_bytes, self._timeout_s, self._host = bucket_bytes, timeout_s, host
        self._server: dist.TCPStore | None = None
        self._clients: StoreClients | None = None
        self._connections: dict[int, Connection] = {}
        self._agreement: Agreement | None = None
        self._generation = 0  # of the engines, when that was made
        self._homes: list[tuple[int, int]] = []  # of each shard: its engine, and which of that engine's it is
        self._lost: set[int] = set()  # engines of the agreement that this rank sends nothing more
        self._layouts: list[ShardLayout] = []
        self._pieces: list[Piece] = []
        self._buckets: list[WeightBucket] = []
        self._plans: list[ReceivePlan] = []
        self._buffer: Tensor | None = None

    def _deliver(self, learner: Learner, version: int, clock: Clock) -> Delivered | None:
        """The engines receive while the ranks send. One that is lost meanwhile is left out.

        Raises:
            RuntimeError: a rank failed.
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
            if pool.generation != self._generation:
                self._generation, self._agreement = pool.generation, None
            self._agree(held, self._engines.shards)
            answers, expected = self._sent(held, pool, pool.engines, version)
        receipts = {engine: answer.value for engine, answer in answers.items() if isinstance(answer, Timed)}
        lost = {engine: answer.reason for engine, answer in answers.items() if isinstance(answer, Lost)}
        num_shards = len(self._engines.shards_of_each)
        pool.note_weights(version, expected[:num_shards])
        num_elements = sum(torch.Size(shape).numel() for shape in held.hf_shapes.values())
        return Delivered(expected[:num_shards], receipts, num_elements * self._dtype.itemsize, lost)

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
            again._agree(held, [self._engines.shards_of_each])
            return again._sent(held, self._engines.pool, [engine], version)[0][engine]
        finally:
            again.close()

    def _sent(
        self, held: Converter, pool: EnginePool, engines: Sequence[int], version: int
    ) -> tuple[Mapping[int, Timed | Lost], list[dict[str, int]]]:
        """Rank 0's part of a transfer to these engines, those of the agreement: (what each answers, checksums of each shard)."""
        plans = iter(self._receive_plans())
        rendezvous_of = dict(zip(engines, self._rendezvous, strict=True))
        updates = {
            engine: WeightUpdate("", version, tuple(itertools.islice(plans, each.num_shards)))
            for engine, each in rendezvous_of.items()
        }

        def give_up(engine: int, reason: str) -> None:
            TransferStore(rendezvous_of[engine], self._clients).give_up(reason)

        return _side_by_side(lambda: pool.receive_weights(updates, give_up), lambda: self._send(held))

    def close(self, *, is_broken: bool = False) -> None:
        """Leave the connections; may be called twice. is_broken: end what is under way first."""
        for connection in self._connections.values():
            connection.close(is_broken=is_broken)
        self._connections.clear()
        self._server, self._clients, self._buffer = None, None, None

    @abstractmethod
    def _connect(self, device: torch.device) -> None:
        """Meet the engines, which do the same; does nothing after the first time."""

    @abstractmethod
    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        """This rank's part in getting a bucket to its engine shard."""

    @property
    def _rendezvous(self) -> tuple[Rendezvous, ...]:
        """Where each engine is met."""
        assert self._agreement is not None, "_agree comes first"
        return self._agreement.engines

    @contextlib.contextmanager
    def _unless_lost(self, engine: int) -> Iterator[None]:
        """The body ends where the transfer to this engine breaks: it gets nothing more."""
        try:
            yield
        except TransferBroken:  # rank 0 hears of it from the engine's pool
            self._lost.add(engine)

    def _agree(self, held: Converter, shards: Sequence[Sequence[EngineShard]] = ()) -> None:
        """Make the same plan on all ranks where rank 0 has none; it knows the shards of each engine. Collective."""
        told = None
        if rank() == 0:
            if self._agreement is None:
                self.close(is_broken=True)
            told = self._agreement or Agreement(self._new_rendezvous(shards), tuple(itertools.chain(*shards)))
        agreement = decode(Agreement, broadcast_bytes(encode(told) if told is not None else None))
        if agreement == self._agreement:
            return
        if rank() != 0:
            self.close(is_broken=True)
        self._agreement, self._plans, self._lost = agreement, [], set()
        self._clients = StoreClients(agreement.engines[0], self._server)
        self._homes = [(n, shard) for n, each in enumerate(agreement.engines) for shard in range(each.num_shards)]
        layout_of = {shard: shard_layout(held.hf_shapes, shard) for shard in dict.fromkeys(agreement.shards)}
        self._layouts = [layout_of[shard] for shard in agreement.shards]
        self._pieces = plan_pieces(held.boxes_of_ranks(), [layout.needs for layout in self._layouts])
        self._buckets = plan_buckets(self._pieces, world_size(), self._max_elements)

    @property
    def _max_elements(self) -> int:
        """Numbers that a bucket holds at most."""
        return max(1, self._bucket_bytes // self._dtype.itemsize)

    def _new_rendezvous(self, shards: Sequence[Sequence[EngineShard]]) -> tuple[Rendezvous, ...]:
        timeout = timedelta(seconds=self._timeout_s)
        self._server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        session, dtype = secrets.token_hex(8), str(self._dtype).removeprefix("torch.")
        return tuple(
            Rendezvous(
                f"{session}/{engine}", self._host, self._server.port, self._kind, world_size(), len(of_engine),
                dtype, self._max_elements, self._timeout_s,
            )
            for engine, of_engine in enumerate(shards)
        )  # fmt: skip

    def _receive_plans(self) -> list[ReceivePlan]:
        """What each engine shard has to know: the same at every publish, and made at the first after an agreement."""
        if not self._plans:
            buckets_to: dict[int, list[WeightBucket]] = defaultdict(list)
            for bucket in self._buckets:
                buckets_to[bucket.target].append(bucket)
            self._plans = [
                receive_plan(self._rendezvous[engine], shard, layout, buckets_to[target])
                for target, ((engine, shard), layout) in enumerate(zip(self._homes, self._layouts, strict=True))
            ]
        return self._plans

    @torch.no_grad()
    def _send(self, held: Converter) -> list[dict[str, int]]:
        """Send this rank's part of every bucket; {fused tensor: checksum} that each engine shard must report.

        Once a rank has given an engine up, no rank keeps the agreement: the next publish makes another.
        """
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
        is_whole = True
        for told in gather_bytes(encode(_Told(sums, not self._lost))):
            of_rank = decode(_Told, told)
            is_whole &= of_rank.has_sent_all
            for key, value in of_rank.sums.items():
                total[key] = total.get(key, 0) + value
        if not is_whole:
            self._agreement = None
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
    """From every rank to every engine shard, over a process group for each engine; without CUDA it is gloo's."""

    _kind = "nccl"
    _connections: dict[int, GroupConnection]  # type: ignore[assignment]  # by engine

    def _connect(self, device: torch.device) -> None:
        for engine, rendezvous in enumerate(self._rendezvous):
            if engine not in self._connections:
                with self._unless_lost(engine):
                    self._connections[engine] = GroupConnection(rendezvous, rank(), device, self._clients)

    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        engine, shard = self._homes[bucket.target]
        if bucket.source == rank() and engine not in self._lost:
            with self._unless_lost(engine):
                self._connections[engine].send(self._packed(bucket, held), shard)


class IpcChannel(DirectChannel):
    """Through memory that an engine shard shares with the rank on its GPU, its relay; without CUDA it is a file's."""

    _kind = "ipc"
    _connections: dict[int, SharedBuffer]  # type: ignore[assignment]  # of the shards that this rank is the relay of
    _relays: Sequence[int | None] = ()  # the rank of each shard; None: its engine was lost before it said where it is

    def close(self, *, is_broken: bool = False) -> None:
        super().close(is_broken=is_broken)
        self._relays = ()

    def _connect(self, device: torch.device) -> None:
        if self._relays:
            return
        ranks = [decode(Site, told) for told in gather_bytes(encode(site_of(device)))]
        told = broadcast_bytes(encode(_Sites(self._sites())) if rank() == 0 else None)
        self._relays = relay_ranks(ranks, decode(_Sites, told).of_shards)
        for target, relay in enumerate(self._relays):
            engine, shard = self._homes[target]
            if relay is None:
                self._lost.add(engine)
            elif relay == rank():
                self._connections[target] = SharedBuffer(
                    self._rendezvous[engine], shard, device, self._clients, is_relay=True
                )

    def _sites(self) -> list[Site | None]:
        """Where each shard says that it is; None where its engine is given up. One rank asks, so that all know the same."""
        sites: list[Site | None] = []
        for engine, rendezvous in enumerate(self._rendezvous):
            found: list[Site | None] = [None] * rendezvous.num_shards
            with self._unless_lost(engine):
                store = TransferStore(rendezvous, self._clients)
                found = [Site(*store.get(f"site{shard}").split("\n")) for shard in range(rendezvous.num_shards)]
            sites += found
        return sites

    def _pass_on(self, bucket: WeightBucket, held: Converter) -> None:
        relay, (engine, _) = self._relays[bucket.target], self._homes[bucket.target]
        if relay is None:
            return
        if relay == rank():
            shared = self._connections[bucket.target]
            slot = shared.slot(bucket.num_elements)
            if bucket.source == rank():
                self._packed(bucket, held, slot)
            else:
                dist.recv(slot.view(torch.uint8), bucket.source)
            if engine not in self._lost:
                with self._unless_lost(engine):
                    shared.hand_over()
        elif bucket.source == rank():
            dist.send(self._packed(bucket, held).view(torch.uint8), relay)


def _part(piece: Piece, held: Converter) -> Tensor:
    """The piece's numbers [rows, columns], in the trainer's memory."""
    own, box = held.boxes_of_ranks()[rank()][piece.name], piece.box
    return held.matrix(piece.name)[box.row - own.row : box.row_end - own.row, box.col - own.col : box.col_end - own.col]


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells the others: its share of the checksums' sums; has_sent_all: it has given up no engine."""

    sums: dict[str, int]
    has_sent_all: bool


@dataclass(frozen=True, slots=True)
class _Sites:
    of_shards: list[Site | None]


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
