"""Memory of a learner's tensors, which sleeps in pinned CPU memory while engines on the same GPU decode (trainer.sleep).

A sleeping tensor keeps its identity and loses its storage's bytes. Views of megatron's flat buffers (parameters, main_grad, the
optimizer's shards) therefore stay views, and are valid again once the storage is refilled. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from marsrl.trainer.machine import training_device


class Memory:
    """Storages of tensors on the training device that sleep and wake together.

        memory = Memory(lambda: model.parameters(), lambda: [buffer.grad_data])
        memory.sleep()
        memory.held(parameter)      # its values, in CPU memory
        memory.wake()               # equal bits

    kept: returns the tensors whose values are kept; called by each sleep, because a load replaces the optimizer's state.
    dropped: returns the tensors whose values are lost, such as gradients, which are zeroed before use.
    """

    def __init__(self, kept: Callable[[], Iterable[Tensor]], dropped: Callable[[], Iterable[Tensor]] = tuple) -> None:
        self._kept, self._dropped = kept, dropped
        self._storages: list[tuple[torch.UntypedStorage, int]] = []  # Sleeping storages, with their sizes in bytes.
        self._copies: dict[int, Tensor] = {}  # Bytes by storage; allocated once, because pinning memory is slow.

    @property
    def is_asleep(self) -> bool:
        return bool(self._storages)

    @torch.no_grad()
    def sleep(self) -> None:
        """Copy the values to CPU memory and free the storages; a no-op while asleep."""
        if self.is_asleep:
            return
        before, self._copies = self._copies, {}
        for storage in _storages(self._kept()):
            copy = before.get(storage._cdata)
            if copy is None or copy.nbytes != storage.nbytes():
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=True)
            self._copies[storage._cdata] = copy.copy_(_bytes(storage), non_blocking=True)
            self._storages.append((storage, storage.nbytes()))
        self._storages += [(storage, storage.nbytes()) for storage in _storages(self._dropped())]
        torch.cuda.synchronize()  # The copies are read on the CPU, and other streams may still use the storages.
        for storage, _ in self._storages:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # Return the memory to the engine's process.

    @torch.no_grad()
    def wake(self) -> None:
        """Allocate the storages again and restore the kept values; a no-op while awake."""
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
            if (copy := self._copies.get(storage._cdata)) is not None:
                _bytes(storage).copy_(copy, non_blocking=True)
        torch.cuda.synchronize()  # Other streams may use the storages at once.
        self._storages.clear()

    def held(self, tensor: Tensor) -> Tensor:
        """Return the tensor; while it sleeps, its values in CPU memory, with the same shape and strides."""
        copy = self._copies.get(tensor.untyped_storage()._cdata) if self.is_asleep else None
        if copy is None:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield each storage on the training device once, except storages of single numbers (AdamW's step)."""
    device, found = training_device(), set[int]()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device == device and tensor.dim() and storage._cdata not in found:
            found.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
