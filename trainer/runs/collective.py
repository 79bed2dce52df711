"""Collectives of bytes between ranks: barrier, broadcast, scatter, gather, and a failure on one that is raised on all.

All of it begins with a meeting at the store (`barrier`), where ranks that have nothing to do sleep: rank 0 plays, evaluates
and starts engines alone, for hours at times, and a kernel of NCCL that waits for it would take the GPU from an engine beside
it. The collective behind a meeting is short, and so may its limit be (COLLECTIVE_S). Nothing limits a meeting: whether a rank
that is not there yet still lives is heartbeat.py's to say.
"""

from __future__ import annotations

import datetime
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE_S = 1800.0
"""After so long in a collective, which all ranks have come to, something hangs that still beats. More than ranks that read a
model from one slow disk end apart."""

PIECE_BYTES = 1 << 20
"""Bytes that each rank brings to one all_gather: a few MB of one rank would else be as many on the device for every rank
that there is."""

SCATTER_BYTES = 64 << 20
"""Bytes of all parts together that rank 0's device holds for one scatter; other devices hold those of one part."""

_LONG = datetime.timedelta(days=1)  # of one wait at the store, which begins anew then


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """All ranks are here. Those that came first have slept meanwhile, without a limit (the module says why). Collective."""
    if world_size() == 1:
        return
    meeting = _meeting()
    meeting.number += 1
    here, all_here, store = f"{meeting.number}/here", f"{meeting.number}/all", meeting.store
    if store.add(here, 1) == world_size():
        for key in (f"{meeting.number - 1}/here", f"{meeting.number - 1}/all"):  # everybody has left the one before
            store.delete_key(key)
        store.set(all_here, "")
    else:
        _sleep_until(store, all_here)


@dataclass(slots=True)
class _Meeting:
    """Meeting point of the ranks, on its own connection (a waiting rank blocks its connection). number: meetings so far."""

    store: dist.Store
    number: int = 0


_MEETINGS: weakref.WeakKeyDictionary[dist.Store, _Meeting] = weakref.WeakKeyDictionary()  # by the process group's store


def _meeting() -> _Meeting:
    store: Any = dist.distributed_c10d._get_default_store()
    if store not in _MEETINGS:
        _MEETINGS[store] = _Meeting(dist.PrefixStore("marsrl/meeting", store.clone()))
    return _MEETINGS[store]


def _sleep_until(store: dist.Store, key: str) -> None:
    """Returns when the key is there. The store is asked in a thread: its client hears no signal, and this rank's main thread must
    hear that another rank is lost."""
    errors = list[RuntimeError]()

    def wait() -> None:
        while True:
            try:
                return store.wait([key], _LONG)
            except dist.DistStoreError:  # _LONG is over
                continue
            except RuntimeError as error:  # the store is gone
                return errors.append(error)

    thread = threading.Thread(target=wait, name="marsrl-meeting", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank. Collective; `data` is None elsewhere."""
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
    return data if data is not None else bytes(buffer.cpu().numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Routes:
    """Groups by which bytes for a data rank go to all its ranks: along `across`, then inside each replica.

    across: rank 0's group, with the first rank of every `inside`; None on ranks that are not in it.
    inside: this rank's, whose members have one data rank.
    """

    across: dist.ProcessGroup | None
    inside: dist.ProcessGroup


def scatter_bytes(parts: Sequence[bytes] | None, data_ranks: Sequence[int], routes: Routes) -> memoryview:
    """This rank's part. Collective, in the middle of others: whoever begins meets first (`barrier`).

    parts: rank 0's, by data rank; None elsewhere. data_ranks: by rank.
    """
    device = _device()
    sizes = torch.zeros(max(data_ranks) + 1, dtype=torch.int64, device=device)
    if parts is not None:
        sizes.copy_(torch.tensor([len(part) for part in parts]))
    dist.broadcast(sizes, src=0)
    ends = sizes.tolist()
    whole = torch.empty(ends[data_ranks[rank()]], dtype=torch.uint8)
    size = min(max(ends), SCATTER_BYTES // len(ends))
    piece = torch.empty(size, dtype=torch.uint8, device=device)
    outgoing = torch.zeros(len(ends) if parts is not None else 0, size, dtype=torch.uint8)  # rank 0's host
    for begin in range(0, max(ends), size or 1):
        if routes.across is not None:
            pieces = None
            if parts is not None:
                for row, part in zip(outgoing.numpy(), parts, strict=True):
                    here = memoryview(part)[begin : begin + size]
                    row[: len(here)] = here  # what stands behind a part's end is not read
                rows = outgoing.to(device)
                pieces = [rows[data_ranks[r]] for r in dist.get_process_group_ranks(routes.across)]
            dist.scatter(piece, pieces, src=0, group=routes.across)
        if routes.inside.size() > 1:
            dist.broadcast(piece, group_src=0, group=routes.inside)
        mine = whole[begin : begin + size]
        mine.copy_(piece[: len(mine)])
    return whole.numpy().data


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank, on every rank. Collective; the device holds PIECE_BYTES of each rank at a time."""
    if world_size() == 1:
        return [data]
    barrier()
    device = _device()
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=device)
    sizes[rank()] = len(data)
    dist.all_reduce(sizes)
    ends = sizes.tolist()
    found = [bytearray() for _ in ends]
    for begin in range(0, max(ends), PIECE_BYTES):
        mine = torch.zeros(min(PIECE_BYTES, max(ends) - begin), dtype=torch.uint8, device=device)
        if piece := data[begin : begin + PIECE_BYTES]:
            mine[: len(piece)] = torch.frombuffer(bytearray(piece), dtype=torch.uint8).to(device)
        pieces = [torch.empty_like(mine) for _ in ends]
        dist.all_gather(pieces, mine)
        for whole, part, end in zip(found, pieces, ends, strict=True):
            whole += part[: max(0, end - begin)].cpu().numpy().tobytes()
    return [bytes(whole) for whole in found]


def all_true(claim: bool) -> bool:
    """True if the claim holds on every rank. Collective."""
    return all(gather_bytes(b"yes" if claim else b""))


def stop_together(error: BaseException | None, what: str, advice: str = "") -> None:
    """Go on where no rank has an error, else raise on all of them. Collective.

    Raises:
        RuntimeError: what, then each rank that failed with its error, then what to do about it.
    """
    told = gather_bytes(f"{type(error).__name__}: {error}".encode() if error is not None else b"")
    failed = [f"rank {r}: {text.decode()}" for r, text in enumerate(told) if text]
    if failed:
        raise RuntimeError("; ".join([what, *failed, advice] if advice else [what, *failed])) from error


def _device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"
