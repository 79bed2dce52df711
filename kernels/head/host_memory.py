"""Chunk sizes of a head on the CPU, and its buffer, which is reused across calls."""

import threading
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostBudget:
    """Size of a head's buffer on the CPU.

    It is num_bytes; if num_rows rows need more, the buffer grows to hold them, up to max_bytes.
    """

    num_bytes: int
    num_rows: int
    max_bytes: int

    def rows(self, width: int, itemsize: int = 4) -> int:
        """Return the number of rows with `width` columns of `itemsize` bytes that fit, at least 1."""
        row = itemsize * width
        return max(1, self.num_bytes // row, min(self.num_rows, self.max_bytes // row))


_kept = threading.local()


def host_buffer(num_floats: int) -> Tensor:
    """Return a buffer [num_floats] float32; all calls by a thread return the same memory.

    Fresh memory would cost a page fault every 4 KiB; for 78 MiB this takes as long as computing 20 rows of logits at V = 151936.
    An op is done with the buffer when it returns, so a thread never needs two buffers at once.
    """
    buffer: Tensor | None = getattr(_kept, "buffer", None)
    if buffer is None or buffer.numel() < num_floats:
        buffer = _kept.buffer = None  # frees the old buffer before the larger one is allocated
        with torch.inference_mode(False):  # a learner may later write to a buffer that an evaluation allocated
            buffer = _kept.buffer = torch.empty(num_floats, dtype=torch.float32, device="cpu")
    return buffer[:num_floats]


def host_chunks(count: int, capacity: int) -> list[int]:
    """Split `count` rows into chunks of about equal size, at most `capacity`; returns their sizes.

    A short last chunk would read the whole weight for few rows.
    """
    number = ceil(count / capacity)
    return [count * (i + 1) // number - count * i // number for i in range(number)]
