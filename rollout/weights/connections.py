"""How a bucket of weights gets from a trainer's rank to an engine shard without a file: over a network, or through shared
memory of one host.

    GroupConnection   a process group of all trainer ranks and all engine shards: NCCL between GPUs, gloo between CPUs
    SharedBuffer      one buffer that both processes map: CUDA IPC on one GPU, a file in /dev/shm between processes of a CPU

Both meet at a TCPStore of trainer rank 0. A connection moves flat tensors of one dtype, at most `max_elements` at a time, and
that buffer is all the memory that it takes. `gloo` and the file are the CPU twins on which routing and order are tested;
NCCL and CUDA IPC have not run on a GPU.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

ConnectionKind = Literal["nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and how both sides meet. session: of these processes; a new one makes everybody connect anew.

    num_ranks: of the trainer; engine shard t is member num_ranks + t of num_ranks + num_shards.
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

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype), self.dtype
        return found

    def store(self) -> PrefixStore:
        """The store at rank 0."""
        store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=self.timeout_s))
        return PrefixStore(self.session, store)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a process keeps its tensors: its host, and the GPU's UUID ("" on a CPU)."""

    host: str
    gpu: str


def site_of(device: torch.device) -> Site:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return Site(socket.gethostname(), gpu)


def relay_ranks(ranks: Sequence[Site], shards: Sequence[Site]) -> list[int]:
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


class GroupConnection:
    """Point to point over a process group of its own; every member opens it at the same time.

    A receiver has one buffer, which the tensor that `receive` returns lies in until the next one.
    """

    def __init__(self, rendezvous: Rendezvous, member: int, device: torch.device) -> None:
        size = rendezvous.num_ranks + rendezvous.num_shards
        store, timeout = rendezvous.store(), timedelta(seconds=rendezvous.timeout_s)
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = ProcessGroupNCCL(store, member, size, options)
        else:
            self._group = ProcessGroupGloo(store, member, size, timeout)
        self._rendezvous, self._device = rendezvous, device
        self._buffer: Tensor | None = None

    def send(self, flat: Tensor, shard: int) -> None:
        """Hand the numbers to an engine shard; returns when the tensor may be reused."""
        self._group.send([flat.view(torch.uint8)], self._rendezvous.num_ranks + shard, 0).wait()
        _finish(self._device)

    def receive(self, rank: int, num_elements: int) -> Tensor:
        """The next bucket of a trainer rank, [num_elements]."""
        if self._buffer is None:
            self._buffer = torch.empty(
                self._rendezvous.max_elements, dtype=self._rendezvous.torch_dtype, device=self._device
            )
        flat = self._buffer[:num_elements]
        self._group.recv([flat.view(torch.uint8)], rank, 0).wait()
        return flat

    def release(self) -> None:
        """What was received last has been copied to its place."""
        _finish(self._device)

    def close(self, *, is_broken: bool = False) -> None:
        """Leave; is_broken: end what is under way first."""
        if is_broken:
            self._group.abort()
        self._group.shutdown()
        self._buffer = None


class SharedBuffer:
    """The buffer between one engine shard and the trainer rank beside it (its relay), and who may touch it.

    relay:  fill buffer -> key "full" -> wait for "empty"        shard:   wait for "full" -> copy -> key "empty"
    """

    def __init__(self, rendezvous: Rendezvous, shard: int, device: torch.device, *, is_relay: bool) -> None:
        self._store = PrefixStore(f"shard{shard}", rendezvous.store())
        self._timeout = timedelta(seconds=rendezvous.timeout_s)
        self._device, self._count, self._path = device, 0, ""
        num_bytes = rendezvous.max_elements * rendezvous.torch_dtype.itemsize
        if is_relay:
            data, handle = self._make(num_bytes)
            self._store.set("buffer", json.dumps(handle))
        else:
            self._store.wait(["buffer"], self._timeout)
            data = self._map(json.loads(self._store.get("buffer")), num_bytes)
        self._buffer = data.view(rendezvous.torch_dtype)

    def slot(self, num_elements: int) -> Tensor:
        """The relay's place for the next bucket, [num_elements]."""
        return self._buffer[:num_elements]

    def hand_over(self) -> None:
        """The relay: tell that the slot is filled, and wait until it has been emptied."""
        _finish(self._device)
        self._store.set(f"full{self._count}", "")
        self._store.wait([f"empty{self._count}"], self._timeout)
        self._store.delete_key(f"full{self._count}")
        self._store.delete_key(f"empty{self._count}")
        self._count += 1

    def receive(self, rank: int, num_elements: int) -> Tensor:
        """The shard: the next bucket, in the relay's memory, whichever rank it is from."""
        self._store.wait([f"full{self._count}"], self._timeout)
        return self._buffer[:num_elements]

    def release(self) -> None:
        """The shard: what was received last has been copied to its place."""
        _finish(self._device)
        self._count += 1
        self._store.set(f"empty{self._count - 1}", "")

    def close(self, *, is_broken: bool = False) -> None:
        """Let go of the buffer; the relay's file goes."""
        self._buffer = torch.empty(0)
        if self._path:
            Path(self._path).unlink(missing_ok=True)

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
