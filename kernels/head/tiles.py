"""The head of a bfloat16 model on the CPU: a chunk of rows meets one tile of the vocabulary after the other.

    for each chunk of up to EXPONENTIALS.rows(V) rows:
        for each tile of the weight, converted to float32:
            logits [R, columns] float32 = hidden @ tile.T              gemms.py
            their statistics, and e^(logit - maximum) in bfloat16      CpuTileKernels
        statistics of the rows, coefficients of those that have one    shards.py, PolicyTerms
        for each tile, converted again:
            dz [n, columns] float32 from the exponentials              CpuTileKernels
            dX += dz @ tile,  dW of the tile = dz.T @ hidden           gemms.py

A tile of logits, of weight and of dW stays in the cache from one step to the next. Whole rows of logits would not: 256 of
them are 31 MiB at V = 32000, half of that as exponentials in bfloat16, which is all that is held of the vocabulary. The
statistics come from the float32 logits; the rounding of an exponential is that of a gradient that is stored in bfloat16.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from marsrl.kernels.head.gradients import HeadGradients
from marsrl.kernels.head.host_memory import HostBudget, host_buffer, host_chunks
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.shards import ShardStatistics, combined, put_statistics
from marsrl.kernels.head.vocabulary import Head

if TYPE_CHECKING:
    from marsrl.kernels.head.rows.cpu_tiles import CpuTileKernels

# Of the exponentials: 256 rows at once up to V = 151936, 74 MiB there, which with a tile are below a quarter of what plain
# PyTorch holds. dW is then formed by one product.
EXPONENTIALS = HostBudget(num_bytes=16 * 2**20, num_rows=256, max_bytes=76 * 2**20)
# Rows whose gradients are formed without exponentials, from logits that are computed again: of a tile at a time.
ROWS_AGAIN = 512


def tiles_for(kernels: RowKernels, head: Head, hidden: Tensor) -> "CpuTileKernels | None":
    """What works on tiles where that is the way to the gradients: both operands are bfloat16, on the CPU."""
    return kernels.tiles if head.weight.dtype == hidden.dtype == torch.bfloat16 else None


def policy_gradients_by_tiles(
    tiles: "CpuTileKernels",
    head: Head,
    rows: Rows,
    statistics: Statistics,
    terms: PolicyTerms,
    gradients: HeadGradients,
) -> None:
    """Statistics, terms.evaluate and gradients of these rows of gradients.hidden; the logits are computed once."""
    width = head.width
    sizes = host_chunks(rows.count, EXPONENTIALS.rows(width, itemsize=2))
    columns = gradients.gemms.tiles()[0].stop
    largest = max(sizes, default=0)
    room = (largest * width + 1) // 2
    buffer = host_buffer(room + largest * columns)
    exponentials, pieces = buffer[:room].view(torch.bfloat16), buffer[room:]
    for number, chunk in enumerate(rows.pieces(sizes)):
        parts = _exponentials(tiles, head, chunk, gradients, exponentials, pieces)
        whole = combined(parts, head.inverse_temperature_at(chunk))
        if head.is_sharded:
            ShardStatistics(whole, head, chunk, is_host=True).put(statistics)
        else:
            put_statistics(whole, head, chunk, True, statistics)
        terms.evaluate(chunk)
        c, e = chunk.take(terms.coefficient), chunk.take(terms.entropy_coefficient)
        kept = ((c != 0) | (e != 0)).nonzero()[:, 0]
        if kept.numel() == 0:
            continue
        tokens = chunk.tokens(kept.device)[kept]

        def dz_of(tile: slice, parts: Tensor = parts, kept: Tensor = kept, tokens: Tensor = tokens) -> Tensor:
            dz, count = _block(pieces, kept.numel(), tile), parts.shape[-1]
            tiles.gradients(
                _block(exponentials[count * tile.start :], count, tile),
                parts[tile.start // columns, 0],
                kept,
                tokens,
                head.tile(tile),
                statistics,
                terms.coefficient,
                terms.entropy_coefficient,
                dz,
            )
            return dz

        gradients.add_pieces(dz_of, tokens, is_last=number == len(sizes) - 1)


def _exponentials(
    tiles: "CpuTileKernels", head: Head, chunk: Rows, gradients: HeadGradients, exponentials: Tensor, pieces: Tensor
) -> Tensor:
    """Parts [tiles, 4, R] float64 as RowKernels.partials gives them; fills exponentials, tile after tile."""
    gemms = gradients.gemms
    hidden = chunk.take(gradients.hidden).float()
    cuts = gemms.tiles()
    parts = torch.empty(len(cuts), 4, chunk.count, dtype=torch.float64, device="cpu")
    targets, inverse = chunk.take(head.targets), head.inverse_temperature_at(chunk)
    for part, tile in zip(parts, cuts, strict=True):
        logits = _block(pieces, chunk.count, tile)
        gemms.tile_logits(hidden, tile, logits)
        head.tile(tile).restrict_(logits, chunk)
        kept = _block(exponentials[chunk.count * tile.start :], chunk.count, tile)
        tiles.exponentials(logits, head.tile(tile), targets, inverse, part, kept)
    return parts


def gradients_by_tiles(
    kernels: RowKernels,
    head: Head,
    rows: Rows,
    statistics: Statistics,
    coefficient: Tensor,
    entropy_coefficient: Tensor,
    gradients: HeadGradients,
) -> None:
    """Gradients of these rows of gradients.hidden, each of which has one, from statistics that are known."""
    sizes = host_chunks(rows.count, ROWS_AGAIN)
    gemms = gradients.gemms
    largest = max(sizes, default=0)
    pieces = host_buffer(largest * gemms.tiles()[0].stop)
    tokens = torch.empty(largest, dtype=torch.int64, device="cpu")
    for number, chunk in enumerate(rows.pieces(sizes)):
        hidden = chunk.take(gradients.hidden).float()

        def dz_of(tile: slice, hidden: Tensor = hidden, chunk: Rows = chunk) -> Tensor:
            dz = _block(pieces, chunk.count, tile)
            gemms.tile_logits(hidden, tile, dz)
            head.tile(tile).restrict_(dz, chunk)
            found = kernels.gradients(
                dz, chunk, head.tile(tile), statistics, coefficient, entropy_coefficient, dz, tokens
            )
            assert found.wait() == chunk.count, "a row without a gradient among those that have one"
            return dz

        gradients.add_pieces(dz_of, chunk.tokens(hidden.device), is_last=number == len(sizes) - 1)


def _block(memory: Tensor, num_rows: int, tile: slice) -> Tensor:
    """[num_rows, columns of the tile] side by side at the start of this memory."""
    columns = tile.stop - tile.start
    return memory[: num_rows * columns].view(num_rows, columns)
