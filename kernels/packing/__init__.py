"""pack, unpack, compact, uncompact: rows of any dtype between padded, packed and kept layouts.

    padded [S, L, ...]  --pack-->  packed [T, ...]  --compact-->  kept [K, ...]
                       <--unpack--                 <--uncompact--

Bits are copied, so every dtype is served exactly. All four are differentiable; what a layout leaves out gets gradient 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.checks import INTEGERS, check, check_cu_seqlens, check_range
from marsrl.kernels.cuda_library import machine_lacks_cuda, why_not_cuda
from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.packing import cpu, cuda, reference
from marsrl.kernels.triton_machine import machine_lacks_triton, why_not_triton


@dataclass(frozen=True)
class Packed:
    """values [T, ...]: the rows of all sequences end to end; cu_seqlens [S+1] int32: where each begins and ends."""

    values: Tensor
    cu_seqlens: Tensor


@dataclass(frozen=True)
class Compacted:
    """values [K, ...]: the rows of the mask in order; ids [K] int64: the row each of them was."""

    values: Tensor
    ids: Tensor


def pack(padded: Tensor, lengths: Tensor, *, num_tokens: int | None = None) -> Packed:
    """The first lengths[s] rows of every sequence, end to end.

    Args:
        padded: [S, L, ...] any dtype; what lies behind a sequence's length is not read.
        lengths: [S] int in 0..L.
        num_tokens: T, the sum of lengths, where the host knows it. None: read from lengths, for which the host waits
            where they are on a device. On a device it is taken at its word: rows beyond the true sum are 0.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    _check_rows("pack", "padded", padded, ("S", "L"))
    num_sequences, length = padded.shape[:2]
    check("pack", "lengths", lengths, (num_sequences,), INTEGERS, padded.device)
    check_range("pack", "lengths", lengths, length)
    cu_seqlens = torch.zeros(num_sequences + 1, dtype=torch.int64, device=padded.device)
    torch.cumsum(lengths, 0, out=cu_seqlens[1:])
    num_tokens = _count("pack", "num_tokens", num_tokens, cu_seqlens[-1], "the sum of lengths")
    return Packed(_PACK(padded, cu_seqlens, num_tokens), cu_seqlens.int())


def unpack(packed: Tensor, cu_seqlens: Tensor, *, max_length: int | None = None, fill: float = 0) -> Tensor:
    """[S, L, ...] the sequences of packed rows, each filled up behind its end: the inverse of pack.

    Args:
        packed: [T, ...] any dtype.
        cu_seqlens: [S+1] int, rising from 0 to T.
        max_length: L; a longer sequence is an error on the CPU and cut on a device. None: the longest sequence, for
            which the host waits where cu_seqlens is on a device.
        fill: what the rows behind a sequence hold, in the dtype of packed.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    _check_rows("unpack", "packed", packed, ("T",))
    num_sequences = check_cu_seqlens("unpack", cu_seqlens, packed.shape[0], packed.device)
    if max_length is None or cu_seqlens.device.type == "cpu":
        longest = int(cu_seqlens.diff().max()) if num_sequences else 0
        if max_length is not None and max_length < longest:
            raise ValueError(f"unpack: max_length is {max_length}, expected at least the longest sequence, {longest}")
        max_length = longest if max_length is None else max_length
    return _UNPACK(packed, cu_seqlens.long().contiguous(), max_length, fill)


def compact(values: Tensor, mask: Tensor, *, num_kept: int | None = None) -> Compacted:
    """The rows whose mask is set, and which they were.

    Args:
        values: [T, ...] any dtype; a row whose mask is off is not read.
        mask: [T] bool.
        num_kept: K, how many are set, where the host knows it. None: counted, for which the host waits where mask is on
            a device. On a device it is taken at its word: spare ids are -1 and their rows 0.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    _check_rows("compact", "values", values, ("T",))
    check("compact", "mask", mask, (values.shape[0],), (torch.bool,), values.device)
    count = mask.sum() if num_kept is None or mask.device.type == "cpu" else None
    capacity = _count("compact", "num_kept", num_kept, count, "the number of set elements of mask")
    ids = _IDS(mask, capacity)
    return Compacted(_COMPACT(values, ids), ids)


def uncompact(values: Tensor, ids: Tensor, num_rows: int, *, fill: float = 0) -> Tensor:
    """[num_rows, ...] with values at ids and `fill` elsewhere: the inverse of compact.

    Args:
        values: [K, ...] any dtype.
        ids: [K] int64, different ones in 0..num_rows-1; on a device, those outside are skipped.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    _check_rows("uncompact", "values", values, ("K",))
    check("uncompact", "ids", ids, (values.shape[0],), (torch.int64,), values.device)
    if num_rows < 0:
        raise ValueError(f"uncompact: num_rows is {num_rows}, expected 0 or more")
    if ids.device.type == "cpu" and ids.numel():
        check_range("uncompact", "ids", ids, num_rows - 1)
        often = int(ids.bincount().argmax())
        if int((ids == often).sum()) > 1:
            raise ValueError(f"uncompact: ids holds {often} more than once, expected different ones")
    return _UNCOMPACT(values, ids.contiguous(), num_rows, fill)


def _check_rows(op: str, name: str, values: Tensor, sizes: tuple[str, ...]) -> None:
    if not isinstance(values, Tensor):
        raise ValueError(f"{op}: {name} is a {type(values).__name__}, expected a tensor")
    if values.dim() < len(sizes):
        raise ValueError(f"{op}: {name} has shape {list(values.shape)}, expected [{', '.join((*sizes, '...'))}]")


def _count(op: str, name: str, given: int | None, found: Tensor | None, what: str) -> int:
    """`given`, or what is found; on the CPU they must agree."""
    if given is not None and given < 0:
        raise ValueError(f"{op}: {name} is {given}, expected {what}")
    if given is None:
        assert found is not None
        return int(found)
    if found is not None and found.device.type == "cpu" and int(found) != given:
        raise ValueError(f"{op}: {name} is {given}, expected {int(found)}, {what}")
    return given


class _Layouts(Protocol):
    """What an implementation has, as a module of functions: reference.py says what each does."""

    def pack_rows(self, padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor: ...

    def unpack_rows(self, packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor: ...

    def kept_ids(self, mask: Tensor, capacity: int) -> Tensor: ...

    def gather_rows(self, values: Tensor, ids: Tensor) -> Tensor: ...

    def scatter_rows(self, values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor: ...


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layouts: _Layouts, padded: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.layouts, ctx.length = layouts, padded.shape[1]
        return layouts.pack_rows(padded.contiguous(), cu_seqlens, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, _Unpack.apply(ctx.layouts, gradient, *ctx.saved_tensors, ctx.length, 0), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layouts: _Layouts, packed: Tensor, cu_seqlens: Tensor, length: int, fill: float) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        ctx.layouts, ctx.num_tokens = layouts, packed.shape[0]
        return layouts.unpack_rows(packed.contiguous(), cu_seqlens, length, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, _Pack.apply(ctx.layouts, gradient, *ctx.saved_tensors, ctx.num_tokens), None, None, None


class _Compact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layouts: _Layouts, values: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layouts, ctx.num_rows = layouts, values.shape[0]
        return layouts.gather_rows(values.contiguous(), ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, _Uncompact.apply(ctx.layouts, gradient, *ctx.saved_tensors, ctx.num_rows, 0), None


class _Uncompact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layouts: _Layouts, values: Tensor, ids: Tensor, num_rows: int, fill: float) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.layouts = layouts
        return layouts.scatter_rows(values.contiguous(), ids, num_rows, fill)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, _Compact.apply(ctx.layouts, gradient, *ctx.saved_tensors), None, None, None


def _ids(layouts: _Layouts, mask: Tensor, capacity: int) -> Tensor:
    return layouts.kept_ids(mask.contiguous(), capacity)


def _load_triton() -> _Layouts:
    from marsrl.kernels.packing import triton_impl  # Triton is imported when a kernel of it first runs

    return triton_impl


def _why_not_cpu(name: str, tensor: Tensor) -> str | None:
    return None if tensor.device.type == "cpu" else f"{name} is on {tensor.device}, csrc/cpu reads host memory"


def _op(name: str, run: Callable[..., Tensor]) -> Op:
    """run takes the functions of an implementation and the arguments of the op, the rows first."""

    def implementation(
        of: str,
        load: Callable[[], _Layouts],
        why_not: Callable[[str, Tensor], str | None],
        machine_lacks: Callable[[], str | None],
    ) -> Implementation:
        return Implementation(
            of,
            lambda *arguments: run(load(), *arguments),
            lambda rows, *_: why_not("the tensor of rows", rows),
            machine_lacks,
        )

    return Op(
        name,
        (
            implementation("cpu", lambda: cpu, _why_not_cpu, library.why_no_cpu_library),
            implementation("triton", _load_triton, why_not_triton, machine_lacks_triton),
            implementation("cuda", lambda: cuda, why_not_cuda, machine_lacks_cuda),
            Implementation("reference", lambda *arguments: run(reference, *arguments)),
        ),
    )


_PACK = _op("pack", _Pack.apply)
_UNPACK = _op("unpack", _Unpack.apply)
_IDS = _op("compact (ids)", _ids)
_COMPACT = _op("compact", _Compact.apply)
_UNCOMPACT = _op("uncompact", _Uncompact.apply)
