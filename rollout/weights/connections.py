"""The ways of a bucket of weights from a trainer's rank to an engine shard without a file.

    GroupConnection   a process group of all trainer ranks and engine shards: NCCL between GPUs, gloo between CPUs
    SharedBuffer      one buffer that both processes map: CUDA IPC on one GPU, a file in /dev/shm between processes of a CPU

All meet at a TCPStore of trainer rank 0. A connection moves flat tensors of one dtype, at most `max_elements` at a time, and
that buffer is all the memory that it takes. `gloo` and the file are the CPU twins on which routing and order are tested;
NCCL and CUDA IPC have not run on a GPU.

Whoever learns that an engine is lost says so at the store (TransferStore.give_up): every wait of the transfer ends within
GIVE_UP_S, everywhere, and a new one begins with new connections.
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

from marsrl.rollout.environment import environment
from marsrl.rollout.error_lines import first_line

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

ConnectionKind = Literal["nccl", "ipc"]

GIVE_UP_S = 0.2
"""Between two looks of whoever waits whether the transfer has been given up."""

_LOOK_S = 0.02  # between two looks for a key, at most
_ABORT_S = 5.0  # that an abort of NCCL is waited for: it may wait itself, for CUDA graphs that know the communicator
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch's watchdog ends the process of whoever loses a peer
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else it tells every group of the same store to dump, and to end
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a watchdog that an abort holds up ends the process, too
}
_GIVEN_UP = "given_up"


class TransferBroken(RuntimeError):
    """The transfer was given up: an engine, or the way to one, is lost."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The meeting point of trainer ranks and engine shards. session: a new one makes them connect anew.

    num_ranks: of the trainer; shard t is member num_ranks + t of num_ranks + num_shards.
    timeout_s: a wait that takes longer gives the transfer up.
    sends_deltas: what travels for a bucket is its length in bytes [8] and, if that is not the bucket's, a delta (delta.py).
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
        """Bytes of the largest bucket."""
        return self.max_elements * self.torch_dtype.itemsize

    def client(self) -> TCPStore:
        """A connection to the store at rank 0."""
        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))


def site_of(device: torch.device) -> str:
    """The place of a process's tensors: its host, and the GPU's UUID."""
    gpu = f" {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
    return socket.gethostname() + gpu


def relay_ranks(ranks: Sequence[str], shards: Sequence[str]) -> list[int]:
    """For each engine shard the trainer rank that shares memory with it: one on its GPU; on a CPU one of its host in turn.

    Raises:
        RuntimeError: a shard has no trainer rank beside it.
    """
    relays = []
    for number, shard in enumerate(shards):
        beside = [rank for rank, site in enumerate(ranks) if site == shard]
        if not beside:
            raise RuntimeError(
                f"sync.backend=ipc: engine shard {number} is on {shard}, where no rank of the trainer is ({list(ranks)}); CUDA "
                "IPC works between two processes on one GPU: use sync.backend=nccl, or place engines on the trainer's GPUs"
            )
        relays.append(beside[number % len(beside)])
    return relays


class TransferStore:
    """A transfer's keys in the store at rank 0, and whether it has been given up; one a process. Nobody blocks its connection.

    A call that a lost peer may block runs in a thread of its own (`unless_given_up`), left behind where the transfer is given up.
    """

    def __init__(self, rendezvous: Rendezvous, server: TCPStore | None = None) -> None:
        """server: rank 0's own."""
        self.rendezvous = rendezvous
        self._keys = PrefixStore(rendezvous.session, server or rendezvous.client())

    def set(self, key: str, value: str = "") -> None:
        self._keys.set(key, value)

    def get(self, key: str) -> str:
        """The value of a key, once it is there; raises as `wait`."""
        self.wait(key)
        return self._keys.get(key).decode()

    def delete(self, key: str) -> None:
        self._keys.delete_key(key)

    def wait(self, key: str) -> None:
        """Return once the key is there, by looking again and again, less often the longer; raises as `unless_given_up`."""
        start = time.monotonic()
        while not self._keys.check([key]):
            self.check()
            waited = time.monotonic() - start
            if waited >= self.rendezvous.timeout_s:
                self._give_up_in_time(f"waiting for {key}")
            time.sleep(min(_LOOK_S, 2e-4 + waited / 16))

    def unless_given_up(self, work: Callable[[], _T], what: str, on_give_up: Callable[[], None] = lambda: None) -> _T:
        """The result of `work`; an error that it raises gives the transfer up, and so does its taking timeout_s.

        what: the work, in words. on_give_up: called where the transfer is given up before the work has ended, for which nobody
            waits any more.

        Raises:
            TransferBroken: the work failed, or the transfer was given up.
        """
        end = time.monotonic() + self.rendezvous.timeout_s
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # raised by the caller's thread
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
        """Raise TransferBroken, with the reason, where the transfer has been given up."""
        if self._keys.check([_GIVEN_UP]):
            raise TransferBroken(self._keys.get(_GIVEN_UP).decode())

    def _give_up_in_time(self, what: str) -> None:
        self.give_up(f"{what} has taken sync.timeout_s = {self.rendezvous.timeout_s:g} s")
        self.check()

    def give_up(self, reason: str) -> None:
        """Every side ends what it waits for. The first reason stays."""
        self._keys.compare_set(_GIVEN_UP, "", reason)


class GroupConnection:
    """Point to point over a process group of all members, who open it at the same time.

    A receiver has one buffer, which the tensor that `receive` returns lies in until the next one.

    Where the transfer is given up, NCCL's communicators are aborted, which ends their kernels and who waits for them. gloo has
    no abort: what it waits for is left to a thread, which ends with the peer's process or with timeout_s; nobody uses what that
    still moves.
    """

    def __init__(self, store: TransferStore, member: int, device: torch.device) -> None:
        """Returns when all members are there. member: a rank, or num_ranks + the number of an engine shard.

        Raises:
            TransferBroken: one of them is not, or the transfer was given up. The same of every method that moves something.
        """
        self._rendezvous, self._device, self._store = store.rendezvous, device, store
        self._group: Any = None
        self._buffer: Tensor | None = None
        if member >= self._rendezvous.num_ranks:
            store.set(f"member{member}")
        for shard in range(self._rendezvous.num_shards):  # a group whose member never comes cannot be aborted
            store.wait(f"member{self._rendezvous.num_ranks + shard}")
        self._group = store.unless_given_up(lambda: _process_group(self._rendezvous, member, device), "connecting")

    def send(self, flat: Tensor, shard: int) -> None:
        """Hand the numbers to an engine shard; returns when the tensor may be reused."""
        self._move(self._group.send, flat, self._rendezvous.num_ranks + shard, f"a send to shard {shard}")

    def receive(self, rank: int, num_bytes: int) -> Tensor:
        """What a trainer rank sends next, [num_bytes] uint8."""
        if self._buffer is None:
            size = max(self._rendezvous.num_bytes, 8)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            _finish(self._device)  # the engine's stream may still use this memory: that of _move does not wait for it
        flat = self._buffer[:num_bytes]
        self._move(self._group.recv, flat, rank, f"waiting for a bucket of rank {rank}")
        return flat

    def release(self) -> None:
        """The last bucket has been copied to its place."""
        _finish(self._device)

    def close(self, *, is_broken: bool = False) -> None:
        """Leave; is_broken: end what is under way first."""
        if is_broken:
            self._abort()
        elif self._group is not None:
            self._group.shutdown()
        self._group, self._buffer = None, None

    def _move(self, move: Callable[[list[Tensor], int, int], Any], flat: Tensor, peer: int, what: str) -> None:
        def work() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            move([flat.view(torch.uint8)], peer, 0).wait()
            _finish(self._device)

        self._store.unless_given_up(work, what, self._abort)

    def _abort(self) -> None:
        """End NCCL's kernels and what waits for them; does nothing where there is no group yet, or it is gloo's."""
        if self._group is None or self._device.type != "cuda":
            return
        thread = threading.Thread(target=self._group.abort, name="marsrl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)
        if thread.is_alive():
            _log.warning("weight sync: NCCL's abort of a transfer to a lost engine takes more than %g s", _ABORT_S)
        self._group = None


def _process_group(rendezvous: Rendezvous, member: int, device: torch.device) -> Any:
    """The group, whose members all make theirs at the same time."""
    store = PrefixStore(rendezvous.session, rendezvous.client())
    timeout = timedelta(seconds=rendezvous.timeout_s)
    size = rendezvous.num_ranks + rendezvous.num_shards
    if device.type != "cuda":
        return ProcessGroupGloo(store, member, size, timeout)
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with environment(**_NCCL_ENVIRONMENT):  # read when a group is made; the trainer's own groups keep torch's ways
        return ProcessGroupNCCL(store, member, size, options)


class SharedBuffer:
    """The buffer between one engine shard and the trainer rank beside it (its relay), and who may touch it.

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
        """The relay's place for the next bucket, [num_elements]."""
        return self._buffer.view(self._dtype)[:num_elements]

    def hand_over(self) -> None:
        """The relay: tell that the slot is filled, and wait until it has been emptied; TransferBroken: it will not be."""
        _finish(self._device)
        self._store.set(self._key(f"full{self._count}"))
        self._store.wait(self._key(f"empty{self._count}"))
        for key in ("full", "empty"):
            self._store.delete(self._key(f"{key}{self._count}"))
        self._count += 1

    def receive(self, rank: int, num_bytes: int) -> Tensor:
        """The shard: the next bucket [num_bytes] uint8, in the relay's memory, whichever rank it is from.

        Raises:
            TransferBroken: none comes.
        """
        self._store.wait(self._key(f"full{self._count}"))
        return self._buffer[:num_bytes]

    def release(self) -> None:
        """The shard: what was received last has been copied to its place."""
        _finish(self._device)
        self._count += 1
        self._store.set(self._key(f"empty{self._count - 1}"))

    def close(self, *, is_broken: bool = False) -> None:
        """Let go of the buffer; the relay's file goes."""
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
        os.posix_fallocate(descriptor, 0, num_bytes)  # no room is an error here, not a bus error later
        os.close(descriptor)
        return self._mapped(self._path, num_bytes), [self._path]

    def _map(self, handle: list[object], num_bytes: int) -> Tensor:
        if self._device.type != "cuda":
            return self._mapped(str(handle[0]), num_bytes)
        # (device, handle, size, offset, reference counter's handle and offset, event's handle, must wait for the event);
        # the relay's GPU is ours (relay_ranks), whatever number it has there
        plain = [base64.b64decode(each) if isinstance(each, str) else each for each in handle]
        storage = torch.UntypedStorage._new_shared_cuda(self._device.index or 0, *plain[1:])
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (num_bytes,), (1,))

    @staticmethod
    def _mapped(path: str, num_bytes: int) -> Tensor:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


Connection = GroupConnection | SharedBuffer


def _finish(device: torch.device) -> None:
    """Wait for the device's queue: the other side reads memory, not streams."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
