"""Chunk sizes of a head on the CPU, and the buffer that it keeps from call to call."""

import threading
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor


@dataclass(frozen=True)
class HostBudget:
    """Size of the buffer of a head on the CPU: num_bytes where they are enough for num_rows, else up to max_bytes."""

    num_bytes: int
    num_rows: int
    max_bytes: int

    def rows(self, width: int, itemsize: int = 4) -> int:
        """Rows of this many columns of so many bytes that fit; 1 at least."""
        row = itemsize * width
        return max(1, self.num_bytes // row, min(self.num_rows, self.max_bytes // row))


_kept = threading.local()


def host_buffer(num_floats: int) -> Tensor:
    """[num_floats] float32, in the same memory in every call of this thread.

    Memory that is fresh from the system costs a page fault every 4 KiB: for 78 MiB as much time as some 20 rows of
    logits at V = 151936. A head is done with before its op returns, so that no two of a thread use the buffer at once.
    """
    kept: Tensor | None = getattr(_kept, "buffer", None)
    if kept is None or kept.numel() < num_floats:
        kept = _kept.buffer = None  # before the larger one comes
        with torch.inference_mode(False):  # whoever asks first: a learner writes later where an evaluation has written
            kept = _kept.buffer = torch.empty(num_floats, dtype=torch.float32, device="cpu")
    return kept[:num_floats]


def host_chunks(count: int, capacity: int) -> list[int]:
    """Sizes of the chunks of so many rows; equal ones, since a GEMM of few rows reads the weight as long."""
    number = ceil(count / capacity)
    return [count * (i + 1) // number - count * i // number for i in range(number)]
