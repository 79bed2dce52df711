"""Reader of llama.cpp's GGUF files (ggml-org/ggml, docs/gguf.md): metadata, and the tensor types that `marsrl fetch` needs.

Layout of a file: magic, version, counts; metadata as (key, type, value); for each tensor its name, sizes (fastest-varying
dimension first), type and offset; then the aligned data. Numbers are little-endian.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
_F32 = 0
_BLOCKS = {
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", 16)]),  # Q4_1
    8: np.dtype([("scale", "<f2"), ("steps", "i1", 32)]),  # Q8_0
}
"""Layout of a block of 32 numbers, by the tensor's type."""


def read_gguf(content: bytes) -> tuple[dict[str, Any], dict[str, npt.NDArray[np.float32]]]:
    """Return metadata by key, and float32 tensors by name with shapes in numpy's order.

    Raises ValueError unless the content is a GGUF file of version 3 with known tensor types.
    """
    reader = _Reader(content)
    magic, version, num_tensors, num_fields = reader.take("<4sIQQ")
    if (magic, version) != (b"GGUF", 3):
        raise ValueError(f"expected a GGUF file of version 3, found {magic!r} and {version}")
    fields = {reader.text(): reader.value(*reader.take("<I")) for _ in range(num_fields)}
    headers = []
    for _ in range(num_tensors):
        name = reader.text()
        sizes = reader.take(f"<{reader.take('<I')[0]}Q")
        headers.append((name, sizes[::-1], *reader.take("<IQ")))
    begin = -(-reader.at // _ALIGNMENT) * _ALIGNMENT
    return fields, {name: _numbers(content, begin + at, kind, name, sizes) for name, sizes, kind, at in headers}


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self.at = content, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self._content, self.at)
        self.at += struct.calcsize(layout)
        return found

    def text(self) -> str:
        (size,) = self.take("<Q")
        return str(self.take(f"{size}s")[0], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.take(f"<{_NUMBERS[kind]}")[0]
        kind, size = self.take("<IQ")
        return [self.text() for _ in range(size)] if kind == _STRING else [*self.take(f"<{size}{_NUMBERS[kind]}")]


def _numbers(content: bytes, at: int, kind: int, name: str, sizes: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Decode a tensor. Each number is step x scale; Q4_1 also adds the block's minimum.

    In a Q4_1 block, the low half-bytes are the first 16 steps and the high half-bytes the other 16.
    """
    num = math.prod(sizes)
    if kind == _F32:
        return np.frombuffer(content, "<f4", num, at).reshape(sizes)
    if kind not in _BLOCKS:
        raise ValueError(f"tensor {name} has GGUF type {kind}; expected F32, Q4_1 or Q8_0 (0, 3 or 8)")
    blocks = np.frombuffer(content, _BLOCKS[kind], num // 32, at)
    scale = blocks["scale"].astype(np.float32)[:, None]
    if kind == 8:
        return (blocks["steps"] * scale).reshape(sizes)
    steps = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1).astype(np.float32)
    return (steps * scale + blocks["least"].astype(np.float32)[:, None]).reshape(sizes)
