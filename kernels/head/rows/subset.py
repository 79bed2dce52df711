"""Subsets of packed tokens, and integers that a device computes and the host reads later."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from marsrl.kernels.checks import kept_first


class LateCount:
    """Integer on a device that the host reads without draining the stream.

    The copy to pinned memory is queued at once; the host blocks only in `wait`, which it calls after queueing more work. On
    the CPU the value is known at once.
    """

    def __init__(self, value: Tensor | int):
        """Queue the copy of the value.

        value: a number, or a [] or [1] integer tensor that the work queued so far computes.
        """
        self._event: torch.cuda.Event | None = None
        self._value = value
        if isinstance(value, Tensor) and value.is_cuda:
            # Name the host explicitly: with another default device, torch would try to pin memory there and fail.
            self._value = torch.empty(1, dtype=value.dtype, pin_memory=True, device="cpu")
            self._value.copy_(value.reshape(1), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def wait(self) -> int:
        """Return the value; blocks the host until the device has computed it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return int(self._value)


@dataclass(frozen=True)
class Rows:
    """Subset of the packed tokens.

    ids: [R] int64, the tokens, ascending. None: the `count` tokens from `first` on.

    If `late` is set, only the first late.wait() tokens count, and count is an upper bound: `settled` drops the others.
    """

    ids: Tensor | None
    first: int
    count: int
    late: LateCount | None = None

    @staticmethod
    def of(mask: Tensor | None, num_tokens: int, is_late: bool = False) -> "Rows":
        """Select the tokens of a [T] bool mask; None: all tokens.

        is_late: leave the count pending instead of waiting for the device.
        """
        if mask is None or num_tokens == 0:
            return Rows(None, 0, num_tokens)
        if is_late:
            number, ids = kept_first(mask)
            return Rows(ids, 0, num_tokens, LateCount(number))
        ids = mask.nonzero()[:, 0]
        return Rows(None, 0, num_tokens) if ids.numel() == num_tokens else Rows(ids, 0, ids.numel())

    def settled(self) -> "Rows":
        """Return these rows with their true count, for which the host waits if it is still pending."""
        if self.late is None:
            return self
        count = min(self.count, self.late.wait())
        return Rows(None if self.ids is None else self.ids[:count], self.first, count)

    def chunks(self, sizes: Sequence[int]) -> "Iterator[Rows]":
        """Yield these rows in order, in chunks whose sizes repeat `sizes` in a cycle.

        The last chunk has the remaining rows.

        Where a chunk begins does not depend on the number of rows, so neither do the bits of a row's result. If the count is
        still pending, its upper bound limits the first chunk, and the true count the others.
        """
        rows, begin = self, 0
        for size in cycle(sizes):
            chunk = rows.part(begin, min(size, rows.count - begin))
            if rows.late is not None:
                yield Rows(chunk.ids, chunk.first, chunk.count, rows.late)
                rows = rows.settled()
            elif chunk.count > 0:
                yield chunk
            begin += size
            if begin >= rows.count:
                return

    def part(self, begin: int, count: int) -> "Rows":
        """Return `count` of these rows, from index `begin` on."""
        if self.ids is None:
            return Rows(None, self.first + begin, count)
        return Rows(self.ids[begin : begin + count], 0, count)

    def tokens(self, device: torch.device) -> Tensor:
        """Return the tokens [R] int64 on this device."""
        if self.ids is None:
            return torch.arange(self.first, self.first + self.count, device=device)
        return self.ids

    def take(self, values: Tensor) -> Tensor:
        """Return values [T, ...] at these tokens, as a view if the tokens are contiguous."""
        return values[self.first : self.first + self.count] if self.ids is None else values.index_select(0, self.ids)

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write values [R, ...] to these tokens of target [T, ...]."""
        if self.ids is None:
            target[self.first : self.first + self.count] = values
        else:
            target.index_copy_(0, self.ids, values)
