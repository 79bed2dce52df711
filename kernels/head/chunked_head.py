"""A head in chunks of rows: statistics, and gradients that wait for backward GEMMs of a good size."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from marsrl.kernels.head.gradients import NOTHING, HeadGradients, Wanted
from marsrl.kernels.head.host_memory import HostBudget, host_buffer, host_chunks
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.shards import ShardStatistics
from marsrl.kernels.head.tiles import gradients_by_tiles, tiles_for
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import num_multiprocessors

# A GEMM reads the whole weight, or reads and writes its whole gradient, which takes as long as computing some 12 to 20
# rows: at V = 151936 chunks of 86 rows cost 13% more than chunks of 128, at V = 32000 chunks of 256 rows save nothing.
# 70 MiB at V = 151936 are below a quarter of what plain PyTorch holds for 256 rows.
HOST = HostBudget(16 * 2**20, 128, 70 * 2**20)
# A device: at V = 151936 chunks of 768 rows of float32 logits, or 1536 of bfloat16 exponentials (first_gemm), and 4224
# rows of bfloat16 gradients: 1.75 GB in all. The
# second is the larger one because each weight-gradient GEMM reads and writes all of dW in float32 (2.5 GB, the time of
# some 1000 rows), and 4224 because dX has then whole waves of tiles (whole_waves). Not measured yet.
DEVICE_LOGITS_BYTES = 448 * 2**20
DEVICE_GRADIENT_BYTES = 1225 * 2**20
# Where logits are never written (first_gemm, statistics alone): 3456 rows at V = 151936, so that reading the weight
# takes a tenth of the time of multiplying it. Not measured yet.
DEVICE_PIECES_BYTES = 64 * 2**20
# Chunks of a device: whole GEMM tiles where they are large, and never a grid axis above 65535.
DEVICE_ROW_MULTIPLE = 128
DEVICE_MAX_ROWS = 16384
TILE_COLUMNS = 256  # of dX: cuBLAS's tile on Hopper for large products is 128 by 256
# A row of logits or of dz takes a multiple of this many elements: 128-bit loads and aligned GEMM operands where V is odd.
COLUMN_MULTIPLE = 16


@dataclass(frozen=True)
class Product:
    """What the first product leaves of a chunk: [R, V] logits, or, where pieces are given, the exponentials that go with
    them, [R, 0] where nobody wants gradients. Overwritten by the next chunk's."""

    values: Tensor
    pieces: Tensor | None = None


class ChunkedHead:
    """One pass over rows of hidden [T, H], chunk after chunk.

        for chunk, product in chunks:
            chunks.statistics(product, chunk, statistics)
            chunks.add_gradients(product, chunk, statistics, coefficient, entropy_coefficient)
        gradients = chunks.finish()

    `policy_rows` stands for both calls with the objective between them, add_known_gradients for the whole loop where
    statistics and coefficients are known and the product is our own (first_gemm).

    The gradients of a chunk wait in a buffer until those of the next would not fit, then enter the backward GEMMs.
    On the CPU that is the buffer of the logits: the next logits lie behind the gradients that wait (bfloat16 models go
    another way there: tiles.py). On a device there are two, and the number of gradients of a chunk is read after the
    next chunk is queued: the device never runs dry. With a vocabulary shard on a device there are two buffers of
    logits: while the statistics of a chunk travel between the ranks the logits of the next are computed. A first_gemm
    leaves exponentials in place of logits; their gradients go to the other buffer all the same: to close the gaps of
    rows without a coefficient in one buffer, a row would have to wait until the one whose place it takes was read.
    """

    def __init__(
        self,
        kernels: RowKernels,
        head: Head,
        hidden: Tensor,
        rows: Rows,
        wanted: Wanted = NOTHING,
        wants_statistics: bool = True,
        compacts: bool = True,
        has_entropy: bool = False,
    ):
        """wants_statistics: they are asked of every chunk. compacts: rows without a coefficient are left out of the
        backward GEMMs, how many a device tells the host; else dz has every row, and the host waits for nothing.
        has_entropy: dL/dH is not 0. Exponentials are then float32: one in bfloat16 is off by up to 0.4%, its logarithm by
        0.004, and c + e (log p + H) may be no larger than that."""
        self._kernels, self._head, self._hidden, self._rows = kernels, head, hidden, rows
        self._compacts = compacts or kernels.is_host
        self._gradients = HeadGradients(head, hidden, wanted, in_pieces=kernels.is_host)
        self._gemms = self._gradients.gemms
        self._first_gemm = kernels.first_gemm
        # Nothing but its statistics is wanted of a product, or it turns into gradients at once.
        self._writes_nothing = self._first_gemm is not None and wants_statistics != wanted.any
        self._has_two_in_flight = head.is_sharded and wants_statistics and not kernels.is_host
        self._flights: deque[ShardStatistics] = deque()
        self._has_entropy = has_entropy
        width, device = head.width, hidden.device
        if kernels.is_host:
            capacity = HOST.rows(width)
            self._sizes = host_chunks(rows.count, capacity)
            held = min(capacity, rows.count)
            self._logits = host_buffer(held * width).view(held, width)
            self._waiting = self._logits
        else:
            self._allocate_on_device(rows.count, has_entropy)
        self._active = torch.empty(self._waiting.shape[0], dtype=torch.int64, device=device)  # whose gradients wait
        self._filled = 0
        self._late: LateCount | None = None

    def _allocate_on_device(self, num_rows: int, has_entropy: bool) -> None:
        """How the rows are cut, a buffer or two for a product, and one for dz."""
        width, wanted, device = self._head.width, self._gradients.wanted, self._hidden.device
        padded = ceil(width / COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        dtype = self._gemms.gradient_dtype
        of_product = torch.float32 if self._first_gemm is None or has_entropy else dtype
        waiting = _rows_of_dz(dtype.itemsize * padded, self._hidden) if wanted.any else 0
        at_most = _device_rows(of_product.itemsize * padded, DEVICE_LOGITS_BYTES)
        if self._writes_nothing and wanted.any:
            at_most = waiting
        elif self._writes_nothing:
            assert self._first_gemm is not None
            at_most = _device_rows(self._first_gemm.row_bytes(width), DEVICE_PIECES_BYTES)
        waiting = max(at_most, waiting) if wanted.any else 0
        full, rest = divmod(waiting, at_most)
        self._sizes = [at_most] * max(1, full) + [rest] * (rest > 0)
        size = min(num_rows, at_most)
        columns, padded_columns = (0, 0) if self._writes_nothing else (width, padded)
        self._logits = torch.empty(size, padded_columns, dtype=of_product, device=device)[:, :columns]
        if self._has_two_in_flight:
            size = size if num_rows > size else 0
            self._other_logits = torch.empty(size, padded_columns, dtype=of_product, device=device)[:, :columns]
        self._waiting = torch.empty(min(num_rows, waiting), padded, dtype=dtype, device=device)[:, :width]

    def __iter__(self) -> Iterator[tuple[Rows, Product]]:
        """(chunk, what the first product leaves of it)."""
        if self._has_two_in_flight:
            yield from self._two_in_flight()
            return
        for chunk in self._chunks():
            begin = 0
            if self._kernels.is_host:
                self._make_room(chunk.count)
                begin = self._filled
            product = self._multiply(chunk, self._logits[begin : begin + chunk.count])
            known = chunk.settled()
            if known.count > 0:
                yield known, Product(product.values[: known.count], product.pieces)

    def _two_in_flight(self) -> Iterator[tuple[Rows, Product]]:
        """The chunks of a vocabulary shard: the statistics of one travel while the logits of the next are computed."""
        before: tuple[Rows, Product] | None = None
        for turn, chunk in enumerate(self._chunks()):
            product = self._multiply(chunk, (self._other_logits if turn % 2 else self._logits)[: chunk.count])
            known = chunk.settled()
            if known.count == 0:
                continue
            product = Product(product.values[: known.count], product.pieces)
            self._flights.append(self._send_statistics(product, known))
            if before is not None:
                yield before
            before = known, product
        if before is not None:
            yield before

    def _multiply(self, chunk: Rows, out: Tensor) -> Product:
        hidden = chunk.take(self._hidden)
        if self._first_gemm is not None:
            exponentials = None if self._writes_nothing else out
            return Product(out, self._first_gemm.exponentials(hidden, chunk, self._head, exponentials))
        self._gemms.logits(hidden, out)
        self._head.restrict_(out, chunk)
        return Product(out)

    def _send_statistics(self, product: Product, chunk: Rows) -> ShardStatistics:
        if self._first_gemm is not None and product.pieces is not None:
            own = self._first_gemm.partials(product.pieces, chunk, self._head)
        else:
            own = self._kernels.partials(product.values, chunk, self._head)
        return ShardStatistics(own, self._head, chunk, self._kernels.is_host)

    def _chunks(self) -> Iterable[Rows]:
        return self._rows.pieces(self._sizes) if self._kernels.is_host else self._rows.chunks(self._sizes)

    def statistics(self, product: Product, chunk: Rows, out: Statistics) -> None:
        """Fill `out` at the rows of the chunk; sums over the shards where there are several."""
        if self._has_two_in_flight:
            self._flights.popleft().put(out)
        elif self._head.is_sharded:
            self._send_statistics(product, chunk).put(out)
        elif self._first_gemm is not None and product.pieces is not None:
            self._first_gemm.statistics(product.pieces, chunk, self._head, out)
        else:
            self._kernels.statistics(product.values, chunk, self._head, out)

    def add_gradients(
        self, product: Product, chunk: Rows, statistics: Statistics, coefficient: Tensor, entropy_coefficient: Tensor
    ) -> None:
        """Turn the rows that have a coefficient into gradients; dL/dlogp and dL/dH are [T] float32."""
        if not self._gradients.wanted.any:
            return
        if not self._kernels.is_host:  # there the logits themselves have taken the room
            self._make_room(chunk.count)
        active = self._active[self._filled :]
        if not self._compacts:
            active[: chunk.count] = chunk.tokens(active.device)
        known = statistics, coefficient, entropy_coefficient
        to = self._waiting[self._filled :], active if self._compacts else None
        if self._first_gemm is not None and product.pieces is not None:
            self._late = self._first_gemm.gradients(
                product.values, product.pieces, chunk, self._head, *known, *to, self._has_entropy
            )
        else:
            self._late = self._kernels.gradients(product.values, chunk, self._head, *known, *to)

    def add_known_gradients(self, statistics: Statistics, coefficient: Tensor, entropy_coefficient: Tensor) -> None:
        """Gradients of all rows, those without a coefficient too, as they leave our own product."""
        assert self._first_gemm is not None, "whose product would it be?"
        known = statistics, coefficient, entropy_coefficient
        for chunk in self._chunks():
            self._make_room(chunk.count)
            out = self._waiting[self._filled : self._filled + chunk.count]
            self._first_gemm.gradients_at_once(chunk.take(self._hidden), chunk, self._head, *known, out)
            settled = chunk.settled()
            self._active[self._filled : self._filled + settled.count] = settled.tokens(out.device)
            self._filled += settled.count

    def policy_rows(self, product: Product, chunk: Rows, statistics: Statistics, terms: PolicyTerms) -> None:
        """Statistics, terms.evaluate and gradients of a chunk; in one walk where the implementation has that."""
        in_one_walk = terms.in_one_walk
        if in_one_walk is None or self._head.is_sharded or not self._gradients.wanted.any:
            self.statistics(product, chunk, statistics)
            terms.evaluate(chunk)
            self.add_gradients(product, chunk, statistics, terms.coefficient, terms.entropy_coefficient)
            return
        to = self._waiting[self._filled :], self._active[self._filled :]
        self._late = in_one_walk(product.values, chunk, self._head, statistics, *to)

    def finish(self) -> HeadGradients:
        """The gradients of all chunks."""
        self._flush(is_last=True)
        return self._gradients

    def _make_room(self, count: int) -> None:
        """For the logits of so many rows on the CPU, for their gradients on a device."""
        self._settle()
        if self._filled + count > self._waiting.shape[0]:
            self._flush(is_last=False)

    def _settle(self) -> None:
        if self._late is not None:
            self._filled += self._late.wait()
            self._late = None

    def _flush(self, is_last: bool) -> None:
        self._settle()
        if self._filled:
            self._gradients.add(self._waiting[: self._filled], self._active[: self._filled], is_last)
            self._filled = 0


def _device_rows(row_bytes: int, num_bytes: int) -> int:
    """How many rows of this size a chunk of a device has."""
    tiles = max(1, num_bytes // (row_bytes * DEVICE_ROW_MULTIPLE))
    return min(DEVICE_MAX_ROWS, tiles * DEVICE_ROW_MULTIPLE)


def _rows_of_dz(row_bytes: int, hidden: Tensor) -> int:
    """How many rows of dz wait for the backward GEMMs on a device."""
    tiles = _device_rows(row_bytes, DEVICE_GRADIENT_BYTES) // DEVICE_ROW_MULTIPLE
    return whole_waves(tiles, ceil(hidden.shape[1] / TILE_COLUMNS), num_multiprocessors(hidden)) * DEVICE_ROW_MULTIPLE


def whole_waves(at_most: int, column_tiles: int, multiprocessors: int) -> int:
    """The number of row tiles, over half of at_most, whose tiles of dX leave the fewest multiprocessors idle in the last
    wave: 33 for 8 tiles of columns (H = 2048) and 132 multiprocessors, 264 tiles in two waves. The larger of equals."""

    def busy_share(row_tiles: int) -> float:
        tiles = row_tiles * column_tiles
        return tiles / (ceil(tiles / multiprocessors) * multiprocessors)

    return max(range(at_most // 2 + 1, at_most + 1), key=lambda tiles: (busy_share(tiles), tiles))


def head_statistics(kernels: RowKernels, head: Head, hidden: Tensor, rows: Rows) -> Statistics:
    """Statistics of these rows of hidden [T, H]; 0 at the others. 2THV FLOPs."""
    statistics = Statistics.zeros(hidden.shape[0], hidden.device)
    chunks = ChunkedHead(kernels, head, hidden, rows)
    for chunk, product in chunks:
        chunks.statistics(product, chunk, statistics)
    return statistics


def head_gradients(
    kernels: RowKernels,
    head: Head,
    hidden: Tensor,
    statistics: Statistics,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    wanted: Wanted,
    compacts: bool = True,
) -> HeadGradients:
    """dX and dW from dL/dlogp and dL/dH [T] float32, with logits computed again: 6THV for the rows that have any, for all
    where not compacts."""
    is_active = (coefficient != 0) | (entropy_coefficient != 0) if compacts or kernels.is_host else None
    rows = Rows.of(is_active, hidden.shape[0], is_late=not kernels.is_host)
    if tiles_for(kernels, head, hidden) is not None:
        gradients = HeadGradients(head, hidden, wanted, in_pieces=True)
        gradients_by_tiles(kernels, head, rows, statistics, coefficient, entropy_coefficient, gradients)
        return gradients
    chunks = ChunkedHead(kernels, head, hidden, rows, wanted, wants_statistics=False, compacts=compacts)
    if kernels.first_gemm is not None:
        chunks.add_known_gradients(statistics, coefficient, entropy_coefficient)
        return chunks.finish()
    for chunk, product in chunks:
        chunks.add_gradients(product, chunk, statistics, coefficient, entropy_coefficient)
    return chunks.finish()
