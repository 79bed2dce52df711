"""Bytes of live tensors, counted like a device's allocator does: the reference for the planner."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# These operations of c10d run in the calling thread. gloo runs all others in a thread of its own.
POINT_TO_POINT = ("send", "recv_", "recv_any_source_")


class LiveBytes(TorchDispatchMode):
    """Counter of the bytes of storages that operations create, until they are freed.

    live: current sum. peak: its maximum. Tensors that existed before are not counted; add their bytes yourself. Collectives run
    on uncounted copies: gloo's thread releases a collective's tensors some time after the waiting thread continues, so the peak
    would depend on scheduling.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()

    def __enter__(self) -> LiveBytes:
        """Start to count. Recomputation resizes storages without an operation, so resize_ is patched too."""
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            if storage in self._known:
                self._change(self._known[storage], storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        if func.namespace == "c10d" and func.overloadpacket.__name__ not in POINT_TO_POINT:
            return _on_copies(func, args, kwargs or {})
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
        size = self._known[storage] = [0]
        self._change(size, storage.nbytes())
        weakref.finalize(storage, self._change, size, 0)

    def _change(self, size: list[int], to: int) -> None:
        self.live += to - size[0]
        self.peak = max(self.peak, self.live)
        size[0] = to


@torch.no_grad()
def _on_copies(collective: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the collective to its end. Its first argument is its output, in every operation of c10d."""
    copies = tree_map_only(torch.Tensor, torch.clone, args)
    result = collective(*copies, **kwargs)
    work = result[-1] if isinstance(result, tuple) else result
    dist.Work.unbox(work).wait()
    for tensor, copy in zip(tree_leaves(args[0]), tree_leaves(copies[0]), strict=True):
        tensor.copy_(copy)
    return (args[0], work) if isinstance(result, tuple) else work


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
