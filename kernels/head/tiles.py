"""Head of a bfloat16 model on the CPU, computed one chunk of rows and one vocabulary tile at a time.

    for each chunk of up to EXPONENTIALS.rows(V) rows:
        for each tile of the weight, converted to float32:
            logits [R, columns] float32 = hidden @ tile.T              gemms.py
            their statistics, and e^(logit - maximum) in bfloat16      CpuRowKernels
        statistics and coefficients of the rows                        shards.py, PolicyTerms
        for each tile, converted again:
            dz [n, columns] float32 from the exponentials              CpuRowKernels
            dX += dz @ tile,  dW of the tile = dz.T @ hidden           gemms.py

A CPU with bfloat16 instructions instead writes each tile of dz over its exponentials, in bfloat16. After the last tile it
computes dX = dz @ weight in a single product, and likewise dW = dz.T @ hidden if no other chunk has gradients.

Tiles of logits, weight and dW stay in the cache from one step to the next. Whole rows of logits would not: 256 rows take 31 MiB
at V = 32000. Of a whole row, only the exponentials are kept, in bfloat16, which takes half as much memory. Statistics come from
the float32 logits. Rounding an exponential to bfloat16 loses as much precision as storing a gradient in bfloat16.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from marsrl.kernels.head.gradients import HeadGradients
from marsrl.kernels.head.host_memory import HostBudget, host_buffer, host_chunks
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, Slopes
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.shards import ShardStatistics, combined, put_statistics
from marsrl.kernels.head.vocabulary import Head

if TYPE_CHECKING:
    from marsrl.kernels.head.rows.cpu import CpuRowKernels

# Up to V = 151936 the buffer for exponentials has room for 256 rows, so that one product forms dW. At that V it takes 74 MiB;
# together with a tile, this is less than a quarter of what plain PyTorch holds.
EXPONENTIALS = HostBudget(num_bytes=16 * 2**20, num_rows=256, max_bytes=76 * 2**20)
# Rows per chunk if gradients are computed from recomputed logits, without stored exponentials.
ROWS_AGAIN = 512


def host_kernels_of_tiles(kernels: RowKernels, head: Head, hidden: Tensor) -> "CpuRowKernels | None":
    """Return `kernels` if this module computes the head, else None.

    This module computes heads with bfloat16 hidden states and weight on the CPU.
    """
    if not kernels.is_host or not head.weight.dtype == hidden.dtype == torch.bfloat16:
        return None
    return cast("CpuRowKernels", kernels)


def policy_gradients_by_tiles(
    kernels: "CpuRowKernels",
    head: Head,
    rows: Rows,
    terms: PolicyTerms,
    slopes: Slopes,
    gradients: HeadGradients,
) -> None:
    """Compute statistics, objective and gradients of these rows of gradients.hidden.

    The logits are computed once.
    """
    width = head.width
    sizes = host_chunks(rows.count, EXPONENTIALS.rows(width, itemsize=2))
    gemms = gradients.gemms
    columns = gemms.tiles()[0].stop
    largest = max(sizes, default=0)
    exponentials, pieces = _buffers(largest, width, columns)
    for number, chunk in enumerate(rows.chunks(sizes)):
        parts = _exponentials(kernels, head, chunk, gradients, exponentials, pieces)
        combined_parts = combined(parts, head.inverse_temperature_at(chunk))
        if head.is_sharded:
            ShardStatistics(combined_parts, head, chunk, is_host=True).put(slopes.statistics)
        else:
            put_statistics(combined_parts, head, chunk, True, slopes.statistics)
        terms.evaluate(chunk)
        c, e = chunk.take(slopes.coefficient), chunk.take(slopes.entropy_coefficient)
        active_rows = ((c != 0) | (e != 0)).nonzero()[:, 0]
        if active_rows.numel() == 0:
            continue
        tokens = chunk.tokens(active_rows.device)[active_rows]

        def dz_of(
            tile: slice, parts: Tensor = parts, active_rows: Tensor = active_rows, tokens: Tensor = tokens
        ) -> Tensor:
            dz = _block(pieces, active_rows.numel(), tile)
            values, maxima = exponentials[: parts.shape[-1], tile], parts[tile.start // columns, 0]
            kernels.exponential_gradients(values, maxima, active_rows, tokens, head.tile(tile), slopes, dz)
            return dz

        gradients.add_pieces(dz_of, tokens, number == len(sizes) - 1, exponentials if gemms.collects_dz else None)


def _exponentials(
    kernels: "CpuRowKernels", head: Head, chunk: Rows, gradients: HeadGradients, exponentials: Tensor, pieces: Tensor
) -> Tensor:
    """Fill `exponentials` tile by tile, and return the partials of each tile.

    The result is [tiles, 4, R] float64; RowKernels.partials defines the four numbers.
    """
    gemms = gradients.gemms
    hidden = chunk.take(gradients.hidden).float()
    cuts = gemms.tiles()
    parts = torch.empty(len(cuts), 4, chunk.count, dtype=torch.float64, device="cpu")
    targets, inverse = chunk.take(head.targets), head.inverse_temperature_at(chunk)
    for part, tile in zip(parts, cuts, strict=True):
        logits = _block(pieces, chunk.count, tile)
        gemms.tile_logits(hidden, tile, logits)
        head.tile(tile).restrict_(logits, chunk)
        kernels.exponentials(logits, head.tile(tile), targets, inverse, part, exponentials[: chunk.count, tile])
    return parts


def gradients_by_tiles(kernels: RowKernels, head: Head, rows: Rows, slopes: Slopes, gradients: HeadGradients) -> None:
    """Add the gradients of these rows (tokens) from known statistics, tile by tile.

    Every row must be active.
    """
    gemms = gradients.gemms
    sizes = host_chunks(rows.count, EXPONENTIALS.rows(head.width, itemsize=2) if gemms.collects_dz else ROWS_AGAIN)
    largest = max(sizes, default=0)
    room, pieces = _buffers(largest, head.width if gemms.collects_dz else 0, gemms.tiles()[0].stop)
    tokens = torch.empty(largest, dtype=torch.int64, device="cpu")
    for number, chunk in enumerate(rows.chunks(sizes)):
        hidden = chunk.take(gradients.hidden).float()

        def dz_of(tile: slice, hidden: Tensor = hidden, chunk: Rows = chunk) -> Tensor:
            dz = _block(pieces, chunk.count, tile)
            gemms.tile_logits(hidden, tile, dz)
            head.tile(tile).restrict_(dz, chunk)
            late_count = kernels.gradients(dz, chunk, head.tile(tile), slopes, dz, tokens)
            assert late_count.wait() == chunk.count, "a row has no gradient; expected one for every row"
            return dz

        tokens_of = chunk.tokens(hidden.device)
        gradients.add_pieces(dz_of, tokens_of, number == len(sizes) - 1, room if gemms.collects_dz else None)


def _buffers(num_rows: int, width: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return two parts of the thread's buffer.

    The first, [num_rows, width] bfloat16, is for exponentials or dz. The second is flat float32 memory for one tile of num_rows
    rows.
    """
    size = (num_rows * width + 1) // 2
    buffer = host_buffer(size + num_rows * columns)
    return buffer[:size].view(torch.bfloat16)[: num_rows * width].view(num_rows, width), buffer[size:]


def _block(memory: Tensor, num_rows: int, tile: slice) -> Tensor:
    """Return a contiguous view [num_rows, columns of the tile] of the start of `memory`, which is flat."""
    columns = tile.stop - tile.start
    return memory[: num_rows * columns].view(num_rows, columns)
