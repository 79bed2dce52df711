"""Output head in chunks of rows: softmax statistics, and gradients by GEMMs over several chunks.

    for chunk, product in chunks:
        chunks.statistics(product, chunk, statistics)
        terms.evaluate(chunk)                                  # the objective
        chunks.add_gradients(product, chunk, slopes)
    gradients = chunks.finish()

dz is the gradient of the loss with respect to the logits. It is computed only for active rows: those with a nonzero coefficient.

On the CPU (HostChunks), dz overwrites the logits of its chunk, and the next chunk's logits follow in the same buffer. bfloat16
models on the CPU use tiles.py instead.

On a device (DeviceChunks), logits and dz have separate buffers. The host queues the next chunk before it reads how many rows of
the last one are active, so the device does not idle. A vocabulary shard on a device (ShardChunks) has two buffers of logits,
because the ranks exchange a chunk's statistics while the next chunk's logits are computed.
"""

from collections import deque
from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.head.gradients import NOTHING, HeadGradients, Wanted
from marsrl.kernels.head.host_memory import HostBudget, host_buffer, host_chunks
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.shards import ShardStatistics
from marsrl.kernels.head.tiles import gradients_by_tiles, host_kernels_of_tiles, policy_gradients_by_tiles
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import num_multiprocessors

# Size of the CPU's buffer of logits. Each GEMM reads the whole weight, or reads and writes its whole gradient, which takes as
# long as computing 12 to 20 rows; small chunks are therefore slow. At V = 151936 chunks of 86 rows cost 13% more than chunks of
# 128; at V = 32000 chunks of 256 rows save nothing. At V = 151936, 70 MiB are less than a quarter of what plain PyTorch holds for
# 256 rows.
HOST = HostBudget(16 * 2**20, 128, 70 * 2**20)
# Sizes of a device's buffers of logits and of dz. At V = 151936 they hold 768 rows of float32 logits and 4224 rows of bfloat16
# dz, 1.75 GB in total. dz has more rows because each weight-gradient GEMM reads and writes all of dW (2.5 GB in float32 at
# H = 4096), which takes as long as computing about 1000 rows. With 4224 rows, the dX GEMM has only full waves of tiles at
# H = 2048 and at H = 4096 (whole_waves). Not measured yet.
DEVICE_LOGITS_BYTES = 448 * 2**20
DEVICE_GRADIENT_BYTES = 1225 * 2**20
# Full chunks on a device have a multiple of this many rows, so that no GEMM tile is partly empty.
DEVICE_ROW_MULTIPLE = 128
DEVICE_MAX_ROWS = 16384
TILE_COLUMNS = 256  # columns of a tile of dX: on Hopper, cuBLAS uses tiles of 128 by 256 for large products
# Rows of logits and of dz are padded to a multiple of this many elements, so that loads are 128 bits even if V is odd.
COLUMN_MULTIPLE = 16


class WaitingGradients:
    """Buffer of rows of dz, which makes the backward GEMMs large.

    When more rows would not fit, the GEMMs consume the buffered rows, and the buffer is empty again.
    """

    def __init__(self, gradients: HeadGradients, buffer: Tensor):
        self._gradients, self._buffer = gradients, buffer
        self._tokens = torch.empty(buffer.shape[0], dtype=torch.int64, device=buffer.device)
        self._filled = 0
        self._late: LateCount | None = None

    def room(self, count: int) -> tuple[Tensor, Tensor]:
        """Return (dz, tokens), views of the free part of the buffers, with space for at least `count` rows."""
        self._settle()
        if self._filled + count > self._buffer.shape[0]:
            self._flush(is_last=False)
        return self._buffer[self._filled :], self._tokens[self._filled :]

    def add(self, count: LateCount) -> None:
        """Record that `count` rows are, or will be, written to the memory that `room` returned."""
        self._late = count

    def finish(self) -> HeadGradients:
        """Run the GEMMs on the rest of the buffer and return the gradients of all rows."""
        self._settle()
        self._flush(is_last=True)
        return self._gradients

    def _settle(self) -> None:
        if self._late is not None:
            self._filled += self._late.wait()
            self._late = None

    def _flush(self, is_last: bool) -> None:
        if self._filled:
            self._gradients.add(self._buffer[: self._filled], self._tokens[: self._filled], is_last)
            self._filled = 0


class Chunks:
    """Pass over the rows of hidden [T, H], chunk by chunk; see the module's docstring."""

    waiting: WaitingGradients

    def __init__(self, kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows, wanted: Wanted):
        self._kernels, self._head, self._hidden, self._rows = kernels, head, hidden, rows
        self._gradients = HeadGradients(head, hidden, wanted, in_pieces=kernels.is_host)

    def __iter__(self) -> Iterator[tuple[Rows, Any]]:
        """Yield (chunk, product): the product holds the chunk's logits, until the next chunk overwrites them."""
        raise NotImplementedError

    def statistics(self, product: Any, chunk: Rows, out: Statistics) -> None:
        """Fill `out` at the rows of the chunk, combined over vocabulary shards if there are several."""
        if self._head.is_sharded:
            self._send_statistics(product, chunk).put(out)
        else:
            self._kernels.statistics(product, chunk, self._head, out)

    def add_gradients(self, product: Any, chunk: Rows, slopes: Slopes) -> None:
        """Compute dz of the chunk's active rows into the buffer that the backward GEMMs read."""
        if self._gradients.wanted.any:
            dz, tokens = self.waiting.room(chunk.count)
            self.waiting.add(self._kernels.gradients(product, chunk, self._head, slopes, dz, tokens))

    def policy_rows(
        self, product: Any, chunk: Rows, statistics: Statistics, terms: PolicyTerms, slopes: Slopes
    ) -> None:
        """Compute a chunk's statistics, objective and gradients, in one pass if the kernels support that."""
        if terms.in_one_walk is not None and not self._head.is_sharded and self._gradients.wanted.any:
            to = self.waiting.room(chunk.count)
            self.waiting.add(terms.in_one_walk(product, chunk, self._head, statistics, *to))
            return
        self.statistics(product, chunk, statistics)
        terms.evaluate(chunk)
        self.add_gradients(product, chunk, slopes)

    def finish(self) -> HeadGradients:
        """Return the gradients of all chunks."""
        return self.waiting.finish()

    def _multiply(self, chunk: Rows, out: Tensor) -> Any:
        return self._kernels.multiply(self._gradients.gemms, chunk.take(self._hidden), chunk, self._head, out)

    def _send_statistics(self, product: Any, chunk: Rows) -> ShardStatistics:
        partials = self._kernels.partials(product, chunk, self._head)
        return ShardStatistics(partials, self._head, chunk, self._kernels.is_host)


class HostChunks(Chunks):
    """Chunks on the CPU, where dz overwrites the logits in the buffer."""

    def __init__(self, kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows, wanted: Wanted):
        super().__init__(kernels, head, hidden, rows, wanted)
        capacity = HOST.rows(head.width)
        self._sizes = host_chunks(rows.count, capacity)
        num_rows = min(capacity, rows.count)
        self.waiting = WaitingGradients(self._gradients, host_buffer(num_rows * head.width).view(num_rows, head.width))

    def __iter__(self) -> Iterator[tuple[Rows, Tensor]]:
        for chunk in self._rows.chunks(self._sizes):
            yield chunk, self._multiply(chunk, self.waiting.room(chunk.count)[0][: chunk.count])


class DeviceChunks(Chunks):
    """Chunks on a device. The host reads a chunk's number of active rows after queueing the next chunk."""

    def __init__(self, kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows, wanted: Wanted):
        super().__init__(kernels, head, hidden, rows, wanted)
        dtype, padded = self._gradients.gemms.gradient_dtype, _padded(head)
        at_most = device_rows(4 * padded, DEVICE_LOGITS_BYTES)
        waiting = max(at_most, rows_of_dz(dtype.itemsize * padded, hidden)) if wanted.any else 0
        full, rest = divmod(waiting, at_most)
        self._sizes = [at_most] * max(1, full) + [rest] * (rest > 0)
        self._rows_at_once = min(rows.count, at_most)
        self._out = self._logits_buffer()
        self.waiting = WaitingGradients(self._gradients, _device_buffer(min(rows.count, waiting), dtype, head))

    def __iter__(self) -> Iterator[tuple[Rows, Any]]:
        for chunk in self._rows.chunks(self._sizes):
            product = self._multiply(chunk, self._out[: chunk.count])
            settled = chunk.settled()
            if settled.count > 0:
                yield settled, product[: settled.count]

    def _logits_buffer(self) -> Tensor:
        return _device_buffer(self._rows_at_once, torch.float32, self._head)


class ShardChunks(DeviceChunks):
    """Chunks of a vocabulary shard on a device.

    Ranks exchange a chunk's statistics while the logits of the next chunk are computed.
    """

    def __iter__(self) -> Iterator[tuple[Rows, Any]]:
        self._flights: deque[ShardStatistics] = deque()
        buffers = [self._out, self._logits_buffer() if self._rows.count > self._rows_at_once else self._out]
        before: tuple[Rows, Any] | None = None
        for turn, chunk in enumerate(self._rows.chunks(self._sizes)):
            product = self._multiply(chunk, buffers[turn % 2][: chunk.count])
            settled = chunk.settled()
            if settled.count == 0:
                continue
            product = product[: settled.count]
            self._flights.append(self._send_statistics(product, settled))
            if before is not None:
                yield before
            before = settled, product
        if before is not None:
            yield before

    def statistics(self, product: Any, chunk: Rows, out: Statistics) -> None:
        self._flights.popleft().put(out)


def _chunks(
    kernels: RowKernels,
    head: Head,
    hidden: Tensor,
    rows: Rows,
    wanted: Wanted = NOTHING,
    wants_statistics: bool = True,
) -> Chunks:
    if kernels.is_host:
        return HostChunks(kernels, head, hidden, rows, wanted)
    mode = ShardChunks if head.is_sharded and wants_statistics else DeviceChunks
    return mode(kernels, head, hidden, rows, wanted)


def _padded(head: Head) -> int:
    return ceil(head.width / COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def _device_buffer(num_rows: int, dtype: torch.dtype, head: Head) -> Tensor:
    """Return a buffer [num_rows, V] whose rows are padded to a multiple of COLUMN_MULTIPLE."""
    return torch.empty(num_rows, _padded(head), dtype=dtype, device=head.weight.device)[:, : head.width]


def device_rows(row_bytes: int, num_bytes: int) -> int:
    """Return how many rows of row_bytes fit num_bytes on a device, rounded to whole GEMM tiles."""
    tiles = max(1, num_bytes // (row_bytes * DEVICE_ROW_MULTIPLE))
    return min(DEVICE_MAX_ROWS, tiles * DEVICE_ROW_MULTIPLE)


def rows_of_dz(row_bytes: int, hidden: Tensor) -> int:
    """Return the number of rows of dz that a device buffers for the backward GEMMs."""
    tiles = device_rows(row_bytes, DEVICE_GRADIENT_BYTES) // DEVICE_ROW_MULTIPLE
    return whole_waves(tiles, ceil(hidden.shape[1] / TILE_COLUMNS), num_multiprocessors(hidden)) * DEVICE_ROW_MULTIPLE


def whole_waves(at_most: int, column_tiles: int, multiprocessors: int) -> int:
    """Return the number of row tiles for which the dX GEMM leaves the fewest multiprocessors idle in its last wave.

    The number is above at_most / 2 and at most at_most; of equally good numbers, the largest is chosen. Example: 33 row tiles
    times 8 column tiles (H = 2048) are 264 tiles, exactly two waves on 132 multiprocessors.
    """

    def busy_share(row_tiles: int) -> float:
        tiles = row_tiles * column_tiles
        return tiles / (ceil(tiles / multiprocessors) * multiprocessors)

    return max(range(at_most // 2 + 1, at_most + 1), key=lambda tiles: (busy_share(tiles), tiles))


def head_statistics(kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows) -> Statistics:
    """Compute the statistics of these rows of hidden [T, H], in 2THV FLOPs. Other tokens get 0."""
    statistics = Statistics.zeros(hidden.shape[0], hidden.device)
    chunks = _chunks(kernels, head, hidden, rows)
    for chunk, product in chunks:
        chunks.statistics(product, chunk, statistics)
    return statistics


def policy_gradients(
    kernels: RowKernels,
    head: Head,
    hidden: Tensor,
    rows: Rows,
    statistics: Statistics,
    terms: PolicyTerms,
    wanted: Wanted,
) -> HeadGradients:
    """Compute statistics, objective and gradients of these rows of hidden [T, H].

    The logits are computed once.
    """
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
    of_tiles = host_kernels_of_tiles(kernels, head, hidden)
    if of_tiles is not None and wanted.any:
        gradients = HeadGradients(head, hidden, wanted, in_pieces=True)
        policy_gradients_by_tiles(of_tiles, head, rows, terms, slopes, gradients)
        return gradients
    chunks = _chunks(kernels, head, hidden, rows, wanted)
    for chunk, product in chunks:
        chunks.policy_rows(product, chunk, statistics, terms, slopes)
    return chunks.finish()


def head_gradients(kernels: RowKernels, head: Head, hidden: Tensor, slopes: Slopes, wanted: Wanted) -> HeadGradients:
    """Compute dX and dW from statistics, dL/dlogp and dL/dH.

    The logits are recomputed, so T active rows take 6THV FLOPs.
    """
    is_active = (slopes.coefficient != 0) | (slopes.entropy_coefficient != 0)
    rows = Rows.of(is_active, hidden.shape[0], is_late=not kernels.is_host)
    if host_kernels_of_tiles(kernels, head, hidden) is not None:
        gradients = HeadGradients(head, hidden, wanted, in_pieces=True)
        gradients_by_tiles(kernels, head, rows, slopes, gradients)
        return gradients
    chunks = _chunks(kernels, head, hidden, rows, wanted, wants_statistics=False)
    for chunk, product in chunks:
        chunks.add_gradients(product, chunk, slopes)
    return chunks.finish()
