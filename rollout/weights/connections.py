"""Connections that carry buckets of weights from trainer ranks to engine shards without files.

    GroupConnection   a process group of all trainer ranks and engine shards: NCCL between GPUs, gloo between CPUs
    SharedBuffer      one buffer that both processes map: CUDA IPC on one GPU, a file in /dev/shm between processes on a CPU

All processes connect to a TCPStore of trainer rank 0. A connection moves flat tensors of one dtype, at most `max_elements` at a
time, and needs one buffer of this size. On CPUs, gloo and the file replace NCCL and CUDA IPC, so that tests can check routing and
order. The NCCL and CUDA IPC connections have not been run on a GPU.

A side that detects a lost engine reports it to the store (TransferStore.give_up). Every wait of the transfer then ends within
GIVE_UP_S, on all sides. A new transfer uses new connections.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from marsrl.rollout.imports import environment
from marsrl.rollout.text import first_line

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ConnectionKind = Literal["nccl", "ipc"]

GIVE_UP_S = 0.2
"""Interval at which waits check whether the transfer has been aborted."""

_LOOK_S = 0.02  # longest interval between two polls of the store for a key
_ABORT_S = 5.0  # limit for an NCCL abort, which may itself wait for CUDA graphs using the communicator
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # otherwise torch's watchdog ends a process that loses a peer
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # otherwise torch tells every group of the same store to dump and exit
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # otherwise a watchdog held up by an abort ends the process, too
}
_GIVEN_UP = "given_up"


class TransferBroken(RuntimeError):
    """Raised when a transfer was aborted, because an engine or the connection to it is lost."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address and settings by which trainer ranks and engine shards find each other.

    session: random id, replaced whenever the members must reconnect.
    num_ranks: number of trainer ranks; shard t is member num_ranks + t of num_ranks + num_shards.
    timeout_s: time limit of every wait; a wait that exceeds it aborts the transfer.
    sends_deltas: True if each message begins with its length (8 bytes), which is followed by a whole bucket or by a shorter delta
        (delta.py). False if each message is a whole bucket.
    """

    session: str
    host: str
    port: int
    kind: ConnectionKind
    num_ranks: int
    num_shards: int
    dtype: str
    max_elements: int
    timeout_s: float
    sends_deltas: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype), self.dtype
        return found

    @property
    def num_bytes(self) -> int:
        """Size of the largest bucket in bytes."""
        return self.max_elements * self.torch_dtype.itemsize

    def client(self) -> TCPStore:
        """Connect to the store at rank 0."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))


def site_of(device: torch.device) -> str:
    """Return the location of a process's tensors: its host, and the GPU's UUID."""
    gpu = f" {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
    return socket.gethostname() + gpu


def relay_ranks(ranks: Sequence[str], shards: Sequence[str]) -> list[int]:
    """Return for each engine shard its relay: the trainer rank that shares memory with it.

    The relay is a rank on the shard's GPU (without GPUs, on its host); if there are several, shards take turns among them.
    ranks, shards: sites (site_of) of the trainer ranks and of the shards.

    Raises RuntimeError: a shard has no trainer rank on its GPU or host.
    """
    relays = []
    for number, shard in enumerate(shards):
        beside = [rank for rank, site in enumerate(ranks) if site == shard]
        if not beside:
            raise RuntimeError(
                f"sync.backend=ipc: engine shard {number} is on {shard}, which has no trainer rank (ranks are on {list(ranks)}); "
                "CUDA IPC needs two processes on one GPU: set sync.backend=nccl, or place engines on the trainer's GPUs"
            )
        relays.append(beside[number % len(beside)])
    return relays


class TransferStore:
    """A transfer's keys in rank 0's store, among them the mark of an aborted transfer. Each process has one.

    `wait` polls the store instead of blocking in it, so an aborted transfer ends the wait. A call that a lost peer may block runs
    in its own thread (`unless_given_up`), and is abandoned if the transfer is aborted.
    """

    def __init__(self, rendezvous: Rendezvous, server: TCPStore | None = None) -> None:
        """Connect to the store. server: the store itself, in the process of rank 0; None elsewhere."""
        self.rendezvous = rendezvous
        self._keys = PrefixStore(rendezvous.session, server or rendezvous.client())

    def set(self, key: str, value: str = "") -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> str:
        """Return the value of a key once it is set. Raises TransferBroken like `wait`."""
        self.wait(key)
        return self._keys.get(key).decode()

    def delete(self, key: str) -> None:
        self._keys.delete_key(key)

    def wait(self, key: str) -> None:
        """Wait until the key is set, polling with growing intervals; at most timeout_s.

        Raises TransferBroken: the time is up, or the transfer was aborted.
        """
        start = time.monotonic()
        while not self._keys.check([key]):
            self.check()
            waited = time.monotonic() - start
            if waited >= self.rendezvous.timeout_s:
                self._give_up_in_time(f"waiting for {key}")
            time.sleep(min(_LOOK_S, 2e-4 + waited / 16))

    def unless_given_up(self, work: Callable[[], _T], what: str, on_give_up: Callable[[], None] = lambda: None) -> _T:
        """Return the result of `work`; if it fails or exceeds timeout_s, abort the transfer.

        what: description of the work, for messages. on_give_up: called if the transfer is aborted before the work has ended,
            which abandons the work.

        Raises TransferBroken: the work failed, or the transfer was aborted.
        """
        end = time.monotonic() + self.rendezvous.timeout_s
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # re-raised in the caller's thread
                done.set_exception(error)

        threading.Thread(target=run, name="marsrl-transfer", daemon=True).start()
        while not wait([done], timeout=min(GIVE_UP_S, self.rendezvous.timeout_s)).done:
            try:
                if time.monotonic() >= end:
                    self._give_up_in_time(what)
                self.check()
            except TransferBroken:
                on_give_up()
                raise
        if (error := done.exception()) is not None:
            self.give_up(f"{type(error).__name__}: {first_line(error)}")
            self.check()
        return done.result()

    def check(self) -> None:
        """Raise TransferBroken, with the reason, if the transfer was aborted."""
        if self._keys.check([_GIVEN_UP]):
            raise TransferBroken(self._keys.get(_GIVEN_UP).decode())

    def _give_up_in_time(self, what: str) -> None:
        self.give_up(f"{what} exceeded sync.timeout_s = {self.rendezvous.timeout_s:g} s")
        self.check()

    def give_up(self, reason: str) -> None:
        """Abort the transfer, which ends the waits of all sides. The first reason is kept."""
        self._keys.compare_set(_GIVEN_UP, "", reason)


class GroupConnection:
    """Point-to-point connection over a process group of all members; all members open it at the same time.

    A receiver has one buffer; the tensor returned by `receive` is a view of it until the next call.

    If the transfer is aborted, NCCL's communicators are aborted, which ends their kernels and waits. gloo cannot abort: a thread
    continues to wait until the peer's process ends or timeout_s has passed, and data that it still receives is not used.
    """

    def __init__(self, store: TransferStore, member: int, device: torch.device) -> None:
        """Join the group; returns once all members have joined. member: a rank, or num_ranks + the number of an engine shard.

        Raises TransferBroken: a member has not joined, or the transfer was aborted. Methods that move data raise it too.
        """
        self._rendezvous, self._device, self._store = store.rendezvous, device, store
        self._group: Any = None
        self._buffer: Tensor | None = None
        if member >= self._rendezvous.num_ranks:
            store.set(f"member{member}")
        for shard in range(self._rendezvous.num_shards):  # wait for all shards: an incomplete group cannot be aborted
            store.wait(f"member{self._rendezvous.num_ranks + shard}")
        self._group = store.unless_given_up(lambda: _process_group(self._rendezvous, member, device), "connecting")

    def send(self, flat: Tensor, shard: int) -> None:
        """Send a tensor to an engine shard; returns once the tensor may be reused."""
        self._move(self._group.send, flat, self._rendezvous.num_ranks + shard, f"a send to shard {shard}")

    def receive(self, rank: int, num_bytes: int) -> Tensor:
        """Return the next message of a trainer rank, [num_bytes] uint8."""
        if self._buffer is None:
            self._buffer = torch.empty(self._rendezvous.num_bytes, dtype=torch.uint8, device=self._device)
            # Wait here, because the engine's stream may still use this memory, and the stream of _move would not wait for it.
            _finish(self._device)
        flat = self._buffer[:num_bytes]
        self._move(self._group.recv, flat, rank, f"waiting for a bucket of rank {rank}")
        return flat

    def release(self) -> None:
        """Wait until the last bucket has been copied, so that the buffer can be reused."""
        _finish(self._device)

    def close(self, *, is_broken: bool = False) -> None:
        """Close the connection; is_broken: abort pending transfers first."""
        if is_broken:
            self._abort()
        elif self._group is not None:
            self._group.shutdown()
        self._group, self._buffer = None, None

    def _move(self, move: Callable[[list[Tensor], int, int], Any], flat: Tensor, peer: int, what: str) -> None:
        def work() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # current device of this thread
            move([flat.view(torch.uint8)], peer, 0).wait()
            _finish(self._device)

        self._store.unless_given_up(work, what, self._abort)

    def _abort(self) -> None:
        """Abort NCCL's kernels and pending wait() calls; a no-op for gloo."""
        if self._group is None:
            return
        thread = threading.Thread(target=self._group.abort, name="marsrl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)
        if thread.is_alive():
            _log.warning("weight sync: aborting a transfer to a lost engine takes more than %g s", _ABORT_S)
        self._group = None


def _process_group(rendezvous: Rendezvous, member: int, device: torch.device) -> Any:
    """Create the process group; all members create theirs at the same time."""
    store = PrefixStore(rendezvous.session, rendezvous.client())
    timeout = timedelta(seconds=rendezvous.timeout_s)
    size = rendezvous.num_ranks + rendezvous.num_shards
    if device.type != "cuda":
        return ProcessGroupGloo(store, member, size, timeout)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with environment(**_NCCL_ENVIRONMENT):  # torch reads these here; the trainer's own groups keep torch's defaults
        return ProcessGroupNCCL(store, member, size, options)


class SharedBuffer:
    """Buffer that an engine shard shares with one trainer rank, its relay. The two take turns.

    relay:  fill buffer -> key "full" -> wait for "empty"        shard:   wait for "full" -> copy -> key "empty"
    """

    def __init__(self, store: TransferStore, shard: int, device: torch.device, *, is_relay: bool) -> None:
        rendezvous = store.rendezvous
        self._store, self._shard = store, shard
        self._device, self._count, self._path = device, 0, ""
        num_bytes = rendezvous.num_bytes
        if is_relay:
            data, handle = self._make(num_bytes)
            self._store.set(self._key("buffer"), json.dumps(handle))
        else:
            self._store.set(f"site{shard}", site_of(device))
            data = self._map(json.loads(self._store.get(self._key("buffer"))), num_bytes)
        self._buffer, self._dtype = data, rendezvous.torch_dtype

    def slot(self, num_elements: int) -> Tensor:
        """Relay side: return the view [num_elements] for the next bucket."""
        return self._buffer.view(self._dtype)[:num_elements]

    def hand_over(self) -> None:
        """Relay side: announce the filled slot and wait until it is emptied; TransferBroken if the transfer ends first."""
        _finish(self._device)
        self._store.set(self._key(f"full{self._count}"))
        self._store.wait(self._key(f"empty{self._count}"))
        for key in ("full", "empty"):
            self._store.delete(self._key(f"{key}{self._count}"))
        self._count += 1

    def receive(self, rank: int, num_bytes: int) -> Tensor:
        """Shard side: return the next bucket, a view [num_bytes] uint8 of the relay's memory.

        rank: ignored, because the relay hands over the buckets of all ranks.

        Raises TransferBroken: the transfer ended first.
        """
        self._store.wait(self._key(f"full{self._count}"))
        return self._buffer[:num_bytes]

    def release(self) -> None:
        """Shard side: release the last bucket, which has been copied."""
        _finish(self._device)
        self._count += 1
        self._store.set(self._key(f"empty{self._count - 1}"))

    def close(self, *, is_broken: bool = False) -> None:
        """Release the buffer; the relay deletes its file."""
        self._buffer = torch.empty(0)
        if self._path:
            Path(self._path).unlink(missing_ok=True)

    def _key(self, name: str) -> str:
        return f"shard{self._shard}/{name}"

    def _make(self, num_bytes: int) -> tuple[Tensor, list[object]]:
        if self._device.type == "cuda":
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            handle = data.untyped_storage()._share_cuda_()
            return data, [base64.b64encode(each).decode() if isinstance(each, bytes) else each for each in handle]
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        descriptor, self._path = tempfile.mkstemp(prefix="marsrl-bucket-", dir=folder)
        os.posix_fallocate(descriptor, 0, num_bytes)  # reports lack of room as an error here, not as a bus error later
        os.close(descriptor)
        return self._mapped(self._path, num_bytes), [self._path]

    def _map(self, handle: list[object], num_bytes: int) -> Tensor:
        if self._device.type != "cuda":
            return self._mapped(str(handle[0]), num_bytes)
        # handle: (device, handle, size, offset, reference counter's handle and offset, event's handle, True if this process must
        # wait for the event). The device is replaced: the relay uses the same GPU as this process (relay_ranks), but its index
        # may differ.
        plain = [base64.b64decode(each) if isinstance(each, str) else each for each in handle]
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index or 0, *plain[1:])
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))

    @staticmethod
    def _mapped(path: str, num_bytes: int) -> Tensor:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


Connection = GroupConnection | SharedBuffer


def _finish(device: torch.device) -> None:
    """Synchronise with the device, because the other side does not wait for this process's streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
