"""Triton's interpreter (3.6), with its silent errors corrected or raised.

- bfloat16 is stored in NumPy as raw uint16. `tl.dot` and casts are corrected here; other arithmetic on it (+ * max exp sum ...)
  raises, because the interpreter would compute with the bit patterns.
- A load or store outside of the kernel's tensors raises; the interpreter would read garbage or crash.
- Tensors are used in place; the interpreter would copy their whole memory after every launch.

Work whose result is never read is left out: it took half of a test's time.
"""

import functools
import math
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceScanOpInterface, TensorHandle

ADVICE = "the interpreter has no bfloat16 arithmetic: cast loaded values to float32 first"


def to_float32(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 numbers, given as uint16, to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Convert floats to bfloat16 numbers, returned as uint16, rounding to nearest even as GPUs do."""
    array = torch.from_numpy(np.ascontiguousarray(values.astype(np.float32)))
    return array.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)


def is_bfloat16(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def widened(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle


class Memory:
    """Address ranges of the tensors passed to the running kernel."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)

    def allow(self, arguments: list[Any]) -> None:
        ranges = sorted(self._ranges(arguments))
        merged: list[list[int]] = []
        for begin, end in ranges:
            if merged and begin < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([begin, end])
        self.begins, self.ends = (np.array([r[side] for r in merged], np.uint64) for side in (0, 1))

    def _ranges(self, arguments: Any) -> list[tuple[int, int]]:
        ranges = []
        for argument in arguments:
            if isinstance(argument, tuple):
                ranges += self._ranges(argument)
            elif hasattr(argument, "base") and hasattr(argument, "block_shape"):  # a tensor descriptor
                ranges += self._ranges([argument.base])
            elif isinstance(argument, torch.Tensor) and argument.numel():
                last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride()))
                begin = argument.data_ptr()
                ranges.append((begin, begin + (last + 1) * argument.element_size()))
        return ranges

    def check(self, what: str, pointers: TensorHandle, mask: TensorHandle) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        data, read = np.broadcast_arrays(pointers.data, mask.data)
        addresses = data[read.astype(bool)].astype(np.uint64)
        if addresses.size == 0:
            return
        place = np.searchsorted(self.begins, addresses, side="right") - 1
        is_inside = place >= 0
        if self.ends.size:
            is_inside &= addresses + np.uint64(size) <= self.ends[np.maximum(place, 0)]
        if not is_inside.all():
            raise IndexError(
                f"{what} outside of the kernel's tensors: {int((~is_inside).sum())} of {addresses.size} elements; "
                "mask them"
            )


MEMORY = Memory()


def install() -> None:
    """Replace the interpreter's operations in this process."""
    builder = InterpreterBuilder
    _leave_out_unread_work()
    _guard_memory(builder)
    _correct_bfloat16(builder)
    for name in ("binary_op", "unary_op", "create_fma", "create_idiv", "create_erf", "create_rsqrt", "create_fabs"):
        setattr(builder, name, _refusing_bfloat16(name, getattr(builder, name)))
    builder.create_clampf = _refusing_bfloat16("clamp", builder.create_clampf)

    apply = ReduceScanOpInterface.apply

    def apply_to_known(self: Any, values: Any) -> Any:
        for value in values if isinstance(values, tuple) else (values,):
            if is_bfloat16(value.handle):
                raise TypeError(f"reduction of bfloat16: {ADVICE}")
        return apply(self, values)

    ReduceScanOpInterface.apply = apply_to_known


def _leave_out_unread_work() -> None:
    """Leave out work of Triton's interpreter that has no effect on results.

    Assertions against integer overflow are not computed: without debug, Triton drops them anyway. `tl` is patched once, instead
    of at every launch and function call. Dtypes and shapes are looked up once.
    """
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    for_good = interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    for_good._changes.clear()  # the end of a launch must not undo the patch
    interpreter._patch_lang = lambda _: for_good
    dtype_of = interpreter._get_np_dtype
    by_name: dict[str, np.dtype] = {}  # dtypes by Triton name; Triton builds such a table at every call

    def known_dtype_of(kind: Any) -> np.dtype:
        if kind.scalar.name not in by_name:
            by_name[kind.scalar.name] = dtype_of(kind.scalar)
        return by_name[kind.scalar.name]

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = _shape_of(kind.shape if kind.is_block() else ())

    interpreter._get_np_dtype = known_dtype_of
    tl.tensor.__init__ = make_tensor


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Return (shape, numel) of a tensor of these sizes, as Triton's own __init__ computes for each tensor."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _refusing_bfloat16(name: str, operation: Any) -> Any:
    def checked(self: Any, *operands: Any) -> Any:
        if any(is_bfloat16(operand) for operand in operands):
            raise TypeError(f"{name} of bfloat16: {ADVICE}")
        return operation(self, *operands)

    return checked


def _correct_bfloat16(builder: Any) -> None:
    dot, cast, convert = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def corrected_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, widened(a), widened(b), d, *rest)

    def corrected_cast(self: Any, source: TensorHandle, to: Any) -> TensorHandle:
        if to.scalar == tl.bfloat16:
            values = widened(source).data
            return TensorHandle(to_bfloat16(values), tl.bfloat16)
        return cast(self, widened(source), to)

    def corrected_conversion(self: Any, source: TensorHandle, to: Any, rounding: Any) -> TensorHandle:
        if to.scalar == tl.bfloat16 or is_bfloat16(source):
            return corrected_cast(self, source, to)
        return convert(self, source, to, rounding)

    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = corrected_dot, corrected_cast, corrected_conversion


def _guard_memory(builder: Any) -> None:
    arguments_of = GridExecutor._init_args_hst

    def remembered(self: Any, arguments: Any, named: dict[str, Any]) -> Any:
        given, given_by_name = arguments_of(self, arguments, named)
        MEMORY.allow([*given, *given_by_name.values()])
        return given, given_by_name

    GridExecutor._init_args_hst = remembered
    GridExecutor._restore_args_dev = lambda *_: None
    load, store, update = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def checked_load(self: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any, **words: Any) -> TensorHandle:
        MEMORY.check("load", pointers, mask)
        return load(self, pointers, mask, *rest, **words)

    def checked_store(self: Any, pointers: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
        MEMORY.check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_update(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> TensorHandle:
        MEMORY.check("atomic", pointers, mask)
        return update(self, operation, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    builder.create_atomic_rmw = checked_update
