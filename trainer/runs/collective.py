"""Collectives between ranks: barrier; broadcast, scatter and gather of bytes; raising one rank's error on all.

Each collective begins with a meeting at the store (`barrier`), at which ranks sleep until all have arrived. Rank 0 plays,
evaluates and starts engines alone, sometimes for hours; a rank that waited in an NCCL kernel would block the GPU for an engine
that shares it. The collective after a meeting is short, and so is its timeout (COLLECTIVE_S). Meetings have no timeout:
heartbeat.py detects ranks that have died.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_S = 1800.0
"""Timeout in seconds of a collective that all ranks have reached. It expires if a rank hangs while its heartbeat continues. Ranks
that load a model from one slow disk must reach the collective within this time of each other."""

PIECE_BYTES = 1 << 20
"""Largest number of bytes per rank in one all_gather. It bounds the device's memory: all ranks' buffers have the largest size."""

SCATTER_BYTES = 64 << 20
"""Largest number of bytes on rank 0's device in one scatter, over all parts; other devices hold one part."""

_LONG = datetime.timedelta(days=1)  # Timeout of one wait at the store; the wait is then repeated.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Sleep until all ranks have called this, without a timeout (see the module's docstring). Collective."""
    if world_size() == 1:
        return
    meeting = _meeting()
    meeting.number += 1
    arrivals, all_arrived, store = f"{meeting.number}/here", f"{meeting.number}/all", meeting.store
    if store.add(arrivals, 1) == world_size():
        # All ranks have left the previous meeting.
        for key in (
            f"{meeting.number - 1}/here",
            f"{meeting.number - 1}/all",
        ):
            store.delete_key(key)
        store.set(all_arrived, "")
    else:
        _sleep_until(store, all_arrived)


@dataclass(slots=True)
class _Meeting:
    """Meeting point of the ranks.

    store: a separate connection, which a waiting rank blocks. number: number of meetings so far.
    """

    store: dist.Store
    number: int = 0


# Keyed by the process group's store.
_MEETINGS: weakref.WeakKeyDictionary[dist.Store, _Meeting] = weakref.WeakKeyDictionary()


def _meeting() -> _Meeting:
    store: Any = dist.distributed_c10d._get_default_store()
    if store not in _MEETINGS:
        _MEETINGS[store] = _Meeting(dist.PrefixStore("marsrl/meeting", store.clone()))
    return _MEETINGS[store]


def _sleep_until(store: dist.Store, key: str) -> None:
    """Return when the key exists.

    A thread waits, because the store's client blocks signals, and the main thread must react when another rank is lost.
    """
    errors = list[RuntimeError]()

    def wait() -> None:
        while True:
            try:
                return store.wait([key], _LONG)
            except dist.DistStoreError:  # Timeout after _LONG.
                continue
            except RuntimeError as error:  # The store is lost.
                return errors.append(error)

    thread = threading.Thread(target=wait, name="marsrl-meeting", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def broadcast_bytes(data: bytes | None) -> bytes:
    """Return rank 0's bytes on every rank. Collective; `data` is None on other ranks."""
    if world_size() == 1:
        assert data is not None
        return data
    barrier()
    device = _device()
    size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, src=0)
    return data if data is not None else buffer.cpu().numpy().tobytes()


@dataclass(frozen=True, slots=True)
class Routes:
    """Process groups to send bytes from rank 0 to all ranks of each data-parallel replica: over `across`, then over `inside`.

    across: the first ranks of all replicas; None on other ranks.
    inside: the ranks of this rank's replica, all with the same data rank.
    """

    across: dist.ProcessGroup | None
    inside: dist.ProcessGroup


def scatter_bytes(parts: Sequence[bytes] | None, data_ranks: Sequence[int], routes: Routes) -> memoryview:
    """Return this rank's part of rank 0's bytes. Collective.

    It contains no barrier: call `barrier` before the first of several calls.

    parts: on rank 0, the bytes for each data rank; None on other ranks.
    data_ranks: the data rank of each rank.
    """
    device = _device()
    sizes = torch.zeros(max(data_ranks) + 1, dtype=torch.int64, device=device)
    if parts is not None:
        sizes.copy_(torch.tensor([len(part) for part in parts]))
    dist.broadcast(sizes, src=0)
    ends = sizes.tolist()
    own_bytes = torch.empty(ends[data_ranks[rank()]], dtype=torch.uint8)
    size = min(max(ends), SCATTER_BYTES // len(ends))
    piece = torch.empty(size, dtype=torch.uint8, device=device)
    # Rank 0 keeps all parts in host memory.
    outgoing = torch.zeros(len(ends) if parts is not None else 0, size, dtype=torch.uint8)
    for begin in range(0, max(ends), size or 1):
        if routes.across is not None:
            pieces = None
            if parts is not None:
                for row, part in zip(outgoing.numpy(), parts, strict=True):
                    chunk = memoryview(part)[begin : begin + size]
                    row[: len(chunk)] = chunk  # Data after a part's end is not read.
                rows = outgoing.to(device)
                pieces = [rows[data_ranks[r]] for r in dist.get_process_group_ranks(routes.across)]
            dist.scatter(piece, pieces, src=0, group=routes.across)
        if routes.inside.size() > 1:
            dist.broadcast(piece, group_src=0, group=routes.inside)
        received = own_bytes[begin : begin + size]
        received.copy_(piece[: len(received)])
    return own_bytes.numpy().data


def gather_bytes(data: bytes) -> list[bytes]:
    """Return on every rank the bytes of all ranks, in order. Collective; the device holds PIECE_BYTES per rank at a time."""
    if world_size() == 1:
        return [data]
    barrier()
    device = _device()
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=device)
    sizes[rank()] = len(data)
    dist.all_reduce(sizes)
    ends = sizes.tolist()
    bytes_of_ranks = [bytearray() for _ in ends]
    for begin in range(0, max(ends), PIECE_BYTES):
        own_piece = torch.zeros(min(PIECE_BYTES, max(ends) - begin), dtype=torch.uint8, device=device)
        if piece := data[begin : begin + PIECE_BYTES]:
            own_piece[: len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device)
        pieces = [torch.empty_like(own_piece) for _ in ends]
        dist.all_gather(pieces, own_piece)
        for rank_bytes, part, end in zip(bytes_of_ranks, pieces, ends, strict=True):
            rank_bytes += part[: max(0, end - begin)].cpu().numpy().tobytes()
    return [bytes(rank_bytes) for rank_bytes in bytes_of_ranks]


def all_true(claim: bool) -> bool:
    """Return True if the claim holds on every rank. Collective."""
    return all(gather_bytes(b"yes" if claim else b""))


def stop_together(error: BaseException | None, what: str) -> None:
    """Return if no rank has an error, else raise on all of them. Collective.

    Raises:
        RuntimeError: `what`, then each failed rank with its error.
    """
    errors = gather_bytes(f"{type(error).__name__}: {error}".encode() if error is not None else b"")
    failed = [f"rank {r}: {text.decode()}" for r, text in enumerate(errors) if text]
    if failed:
        raise RuntimeError("; ".join([what, *failed])) from error


@contextmanager
def stopping_together(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise on all ranks any error of these kinds that a rank raises in the body (stop_together). Collective."""
    error: Exception | None = None
    try:
        yield
    except kinds as raised:
        error = raised
    stop_together(error, what)


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
