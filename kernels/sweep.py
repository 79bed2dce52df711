"""Sweeps over a head in chunks of rows: statistics, and gradients that wait for backward GEMMs of a good size."""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from .gemms import HeadGemms
from .rows.protocol import PolicyTerms, RowKernels, Statistics
from .rows.selection import LateCount, Rows
from .shards import sharded_statistics
from .vocabulary import Head

# CPU: one buffer for logits and gradients, of 16 MiB where that is enough for 128 rows, else of up to 80 MiB. A GEMM
# reads the whole weight, or reads and writes its whole gradient, which takes as long as computing some 12 rows: at
# V = 151936 chunks of 86 rows cost 15% more than chunks of 128, at V = 32000 chunks of 256 rows save nothing.
HOST_BYTES = 16 * 2**20
HOST_ROWS = 128
HOST_MAX_BYTES = 80 * 2**20
# A device: at V = 151936 chunks of 768 rows of float32 logits, and 3072 rows of bfloat16 gradients: 1.4 GB in all. The
# second is the larger one because each weight-gradient GEMM reads and writes all of dW in float32 (2.5 GB, the time of
# some 1000 rows). Not measured yet.
DEVICE_LOGITS_BYTES = 448 * 2**20
DEVICE_GRADIENT_BYTES = 896 * 2**20
# Chunks of a device: whole GEMM tiles where they are large, and never a grid axis above 65535.
DEVICE_ROW_MULTIPLE = 128
DEVICE_MAX_ROWS = 16384


class HeadGradients:
    """Collects dX [T, H] and dW [V, H] float32 of a head while chunks come by; what is not wanted stays None.

    of_weight is also None where no row had a coefficient.
    """

    def __init__(self, gemms: HeadGemms, hidden: Tensor, wants_hidden: bool, wants_weight: bool):
        self.gemms = gemms
        self.hidden = hidden
        self.wants_hidden = wants_hidden
        self.wants_weight = wants_weight
        self._of_hidden: Tensor | None = None
        self.of_weight: Tensor | None = None

    @property
    def wants_any(self) -> bool:
        return self.wants_hidden or self.wants_weight

    @property
    def of_hidden(self) -> Tensor | None:
        """[T, H] in the dtype of hidden; rows that no chunk brought have gradient 0."""
        if self._of_hidden is None and self.wants_hidden:
            self._of_hidden = torch.zeros(self.hidden.shape, dtype=self.hidden.dtype, device=self.hidden.device)
        return self._of_hidden

    def add(self, dz: Tensor, tokens: Tensor) -> None:
        """Add the rows dz [n, V] of the tokens [n] int64, ascending."""
        count = tokens.numel()
        if count == 0:
            return
        rows = _contiguous_or_listed(tokens)
        if self.wants_hidden:
            gradient = self.gemms.hidden_gradient(dz)
            if count == self.hidden.shape[0]:  # all rows at once, as with a small vocabulary
                self._of_hidden = gradient.to(self.hidden.dtype)
            else:
                assert self.of_hidden is not None
                rows.put(self.of_hidden, gradient.to(self.hidden.dtype))
        if self.wants_weight:
            self.of_weight = self.gemms.add_weight_gradient(self.of_weight, dz, rows.take(self.hidden))


def _contiguous_or_listed(tokens: Tensor) -> Rows:
    """Neighbouring tokens need no gather; only the CPU can tell without a wait."""
    if not tokens.is_cuda:
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 == tokens.numel():
            return Rows(None, first, tokens.numel())
    return Rows(tokens, 0, tokens.numel())


class Sweep:
    """One pass over rows of hidden [T, H], chunk after chunk.

        for chunk, logits in sweep:
            sweep.statistics(logits, chunk, statistics)
            sweep.add_gradients(logits, chunk, statistics, coefficient, entropy_coefficient)
        gradients = sweep.finish()

    `policy_rows` stands for both calls with the objective between them.

    The gradients of a chunk wait in a buffer until those of the next would not fit, then enter the backward GEMMs.
    On the CPU that is the buffer of the logits: the next logits lie behind the gradients that wait. On a device there
    are two, and the number of gradients of a chunk is read after the next chunk is queued: the device never runs dry.
    """

    def __init__(
        self,
        kernels: RowKernels,
        head: Head,
        hidden: Tensor,
        rows: Rows,
        wants_hidden: bool = False,
        wants_weight: bool = False,
    ):
        self._kernels, self._head, self._hidden, self._rows = kernels, head, hidden, rows
        self._gemms = HeadGemms(head.weight, hidden.dtype)
        self._gradients = HeadGradients(self._gemms, hidden, wants_hidden, wants_weight)
        width, device = head.width, hidden.device
        self._at_most = _host_rows(width) if kernels.is_host else _device_rows(width)
        size = min(rows.count, self._at_most)
        self._logits = _host_buffer(size, width) if kernels.is_host else torch.empty(size, width, device=device)
        if kernels.is_host:
            self._waiting = self._logits
        else:
            dtype = self._gemms.gradient_dtype
            chunks = max(1, DEVICE_GRADIENT_BYTES // (dtype.itemsize * width * max(1, size)))
            capacity = min(rows.count, chunks * size) if self._gradients.wants_any else 0
            self._waiting = torch.empty(capacity, width, dtype=dtype, device=device)
        self._active = torch.empty(self._waiting.shape[0], dtype=torch.int64, device=device)  # whose gradients wait
        self._filled = 0
        self._late: LateCount | None = None

    def __iter__(self) -> Iterator[tuple[Rows, Tensor]]:
        """(chunk, its logits [R, V] float32, overwritten by the next)."""
        for chunk in self._rows.chunks(self._at_most, equal=self._kernels.is_host):
            begin = 0
            if self._kernels.is_host:
                self._make_room(chunk.count)
                begin = self._filled
            logits = self._logits[begin : begin + chunk.count]
            self._gemms.logits(chunk.take(self._hidden), logits)
            known = chunk.settled()
            if known.count > 0:
                yield known, logits[: known.count]

    def statistics(self, logits: Tensor, chunk: Rows, out: Statistics) -> None:
        """Fill `out` at the rows of the chunk; sums over the shards where there are several."""
        if self._head.is_sharded:
            sharded_statistics(self._kernels, self._head, logits, chunk, out)
        else:
            self._kernels.statistics(logits, chunk, self._head, out)

    def add_gradients(
        self, logits: Tensor, chunk: Rows, statistics: Statistics, coefficient: Tensor, entropy_coefficient: Tensor
    ) -> None:
        """Turn the rows that have a coefficient into gradients; dL/dlogp and dL/dH are [T] float32."""
        if not self._gradients.wants_any:
            return
        self._make_room(chunk.count)
        self._late = self._kernels.gradients(
            logits,
            chunk,
            self._head,
            statistics,
            coefficient,
            entropy_coefficient,
            self._waiting[self._filled :],
            self._active[self._filled :],
        )

    def policy_rows(self, logits: Tensor, chunk: Rows, statistics: Statistics, terms: PolicyTerms) -> None:
        """Statistics, terms.evaluate and gradients of a chunk; in one walk where the implementation has that."""
        in_one_walk = terms.in_one_walk
        if in_one_walk is None or self._head.is_sharded or not self._gradients.wants_any:
            self.statistics(logits, chunk, statistics)
            terms.evaluate(chunk)
            self.add_gradients(logits, chunk, statistics, terms.coefficient, terms.entropy_coefficient)
            return
        self._make_room(chunk.count)
        self._late = in_one_walk(logits, chunk, self._head, statistics, self._active[self._filled :])

    def finish(self) -> HeadGradients:
        """The gradients of all chunks."""
        self._flush()
        return self._gradients

    def _make_room(self, count: int) -> None:
        self._settle()
        if self._filled + count > self._waiting.shape[0]:
            self._flush()

    def _settle(self) -> None:
        if self._late is not None:
            self._filled += self._late.wait()
            self._late = None

    def _flush(self) -> None:
        self._settle()
        if self._filled:
            self._gradients.add(self._waiting[: self._filled], self._active[: self._filled])
            self._filled = 0


_kept = threading.local()


def _host_buffer(num_rows: int, width: int) -> Tensor:
    """[num_rows, width] float32, in the same memory in every call of this thread.

    Memory that is fresh from the system costs a page fault every 4 KiB: for 78 MiB as much time as some 20 rows of
    logits at V = 151936. A sweep ends before its op returns, so that no two of a thread use the buffer at once.
    """
    kept: Tensor | None = getattr(_kept, "buffer", None)
    if kept is None or kept.numel() < num_rows * width:
        kept = _kept.buffer = torch.empty(num_rows * width)
    return kept[: num_rows * width].view(num_rows, width)


def _host_rows(width: int) -> int:
    row = 4 * width
    return max(1, HOST_BYTES // row, min(HOST_ROWS, HOST_MAX_BYTES // row))


def _device_rows(width: int) -> int:
    tiles = max(1, DEVICE_LOGITS_BYTES // (4 * width * DEVICE_ROW_MULTIPLE))
    return min(DEVICE_MAX_ROWS, tiles * DEVICE_ROW_MULTIPLE)


def sweep_statistics(kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows) -> Statistics:
    """Statistics of these rows of hidden [T, H]; 0 at the others. 2THV FLOPs."""
    statistics = Statistics.zeros(hidden.shape[0], hidden.device)
    sweep = Sweep(kernels, head, hidden, rows)
    for chunk, logits in sweep:
        sweep.statistics(logits, chunk, statistics)
    return statistics


def sweep_gradients(
    kernels: RowKernels,
    head: Head,
    hidden: Tensor,
    statistics: Statistics,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    wants_hidden: bool,
    wants_weight: bool,
) -> HeadGradients:
    """dX and dW from dL/dlogp and dL/dH [T] float32, with logits computed again: 6THV for the rows that have any."""
    is_active = (coefficient != 0) | (entropy_coefficient != 0)
    rows = Rows.of(is_active, hidden.shape[0], is_late=not kernels.is_host)
    sweep = Sweep(kernels, head, hidden, rows, wants_hidden, wants_weight)
    for chunk, logits in sweep:
        sweep.add_gradients(logits, chunk, statistics, coefficient, entropy_coefficient)
    return sweep.finish()
