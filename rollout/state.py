"""Exact conversion of dataclasses with arrays to and from bytes (msgpack, no pickle).

Used for checkpoints, batches, requests and results.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

State = TypeVar("State")


def encode(value: object) -> bytes:
    """Encode dataclasses as maps by field name, arrays as (dtype, shape, bytes); exact for floats, NaN included."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode(kind: type[State], data: bytes | memoryview) -> State:
    """Decode a value of type `kind`; ValueError: damaged bytes, or bytes written by another version of the program."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_array)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"rollout state: cannot be read as {kind.__name__} ({error}); it is damaged or was written by another version"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data  # no copy
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"rollout state: {type(value).__name__} cannot be stored")


def _array(kind: Any, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)  # read-only view of the message's bytes
