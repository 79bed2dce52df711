"""Rollout state to and from bytes (msgpack; no pickle): what a checkpoint needs to resume exactly."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

State = TypeVar("State")

_hints = functools.cache(get_type_hints)  # of a class; reading them takes longer than building one of it


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass that are stored."""
    return tuple(f.name for f in fields(kind) if f.init)


def encode(value: object) -> bytes:
    """Dataclasses as maps by field name, arrays as (dtype, shape, bytes); exact, floats included (NaN too).

    Fields with init=False, links to other parts, are left out; the caller of `decode` restores them.
    """
    return msgpack.packb(_plain(value), use_bin_type=True)


def decode(kind: type[State], data: bytes | memoryview) -> State:
    """The value of type `kind` that was encoded.

    Raises:
        ValueError: the bytes are not a state of this type (another version of the program, or damage).
    """
    try:
        return _build(kind, msgpack.unpackb(data, raw=False, strict_map_key=False))
    except (msgpack.exceptions.UnpackException, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"rollout state: cannot be read as {kind.__name__}: {error!r}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | bytes):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data  # no copy
        return [value.dtype.str, list(value.shape), data]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, str):
        return str(value)  # a StrEnum as its value
    raise TypeError(f"rollout state: {type(value).__name__} cannot be stored")


def _build(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:  # `X | None` is the only union in the contract
        (inner,) = [a for a in args if a is not type(None)]
        return None if value is None else _build(inner, value)
    if origin is np.ndarray or kind is np.ndarray:
        dtype, shape, data = value
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    if origin in (dict, Mapping):
        return {_build(args[0], k): _build(args[1], v) for k, v in value}
    if origin is list:
        return [_build(args[0], v) for v in value]
    if origin is tuple:
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_build(a, v) for a, v in zip(inner, value, strict=True))
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        return kind(**{name: _build(hints[name], value[name]) for name in _names(kind)})  # type: ignore[operator, arg-type]
    return kind(value) if isinstance(kind, type) and issubclass(kind, str) else value
