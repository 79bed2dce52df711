"""Bytes of the tensors that are alive, as the allocator of a device would count them: the judge of the planner."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes until it is freed; `peak` is the most alive at once.

    Tensors that were there before are not counted: pass their bytes to whoever adds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in before and storage not in self._known:
                    self._add(storage)
        return result

    def forget_peak(self) -> None:
        self.peak = self.live

    def _add(self, storage: Any) -> None:
        size = storage.nbytes()
        self._known[storage] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


class CudaBytes:
    """The same numbers from torch's allocator of a CUDA device."""

    def __enter__(self) -> CudaBytes:
        torch.cuda.init()
        self._start = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: object) -> None: ...

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated() - self._start

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._start

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()
