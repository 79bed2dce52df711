"""Gradients of the head from exponentials, one chunk after the other.

exponentials [R, V] bfloat16, and sum e^d, sum d e^d of each tile           gemms.py, by QuACK
statistics of the rows, from these sums                                     triton_kernels.py
terms.evaluate: coefficients of the objective                               head/rows
changed exponentials and a factor v per row, with dz = v exponentials       triton_kernels.py
dX = v (exponentials @ weight),   dW += exponentials.T @ (v hidden)         head/gemms.py, by cuBLAS

The host must read the number of active rows before it can queue the last two products. To keep the device busy meanwhile, it
first queues the first rows of the next chunk's product, which are written to a separate buffer.
"""

from __future__ import annotations

from math import ceil

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from marsrl.kernels.head.chunked_head import DEVICE_ROW_MULTIPLE, device_rows, rows_of_dz
from marsrl.kernels.head.gradients import HeadGradients, Wanted
from marsrl.kernels.head.rows.protocol import PolicyTerms, Slopes, Statistics
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.rows.triton_impl import PIECE_COLUMNS, TritonRowKernels, list_active
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.linear_policy_loss.quack_head import UnlikelyTarget, gemms, triton_kernels
from marsrl.kernels.triton_machine import on_device_of

# Size of the separate buffer. At V = 151936, H = 2048 it has 768 rows, which should keep an H200 busy for about 0.6 ms, while the
# host reads two numbers and launches the backward GEMMs. Not measured yet.
AHEAD_BYTES = 224 * 2**20


def quack_gradients(
    kernels: TritonRowKernels,
    head: Head,
    hidden: Tensor,
    rows: Rows,
    statistics: Statistics,
    terms: PolicyTerms,
    wanted: Wanted,
) -> HeadGradients:
    """Compute statistics, objective and gradients, like chunked_head.policy_gradients.

    statistics.maximum receives each row's offset m (gemms.py).

    Raises:
        UnlikelyTarget: exponentials relative to a row's m overflow.
    """
    hidden = hidden.contiguous()
    gradients = HeadGradients(head, hidden, wanted)
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
    at_once = rows_of_dz(2 * head.width, hidden)
    buffer = torch.empty(min(at_once, _whole(rows.count)), head.width, dtype=torch.bfloat16, device=hidden.device)
    ahead = buffer[:0]
    if rows.count > at_once:
        ahead = torch.empty_like(buffer[: device_rows(2 * head.width, AHEAD_BYTES)])
    is_beyond = torch.zeros(1, dtype=torch.int32, device=hidden.device)
    chunks = rows.chunks([at_once])
    upcoming = next(chunks, None)
    product = Product(head, hidden, upcoming, buffer) if upcoming else None
    while product is not None:
        product.fill_rest(ahead)
        chunk = product.chunk.settled()
        if chunk.count == 0:  # the first chunk's size was only an upper bound
            break
        finish(head, chunk, statistics, product, is_beyond)
        late_beyond = LateCount(is_beyond)
        terms.evaluate(chunk)
        active = torch.empty(chunk.count, dtype=torch.int64, device=hidden.device)
        place_of, count = list_active(chunk, slopes, active)
        # While the host waits for `late_beyond` and `count`, the device computes the first rows of the next chunk.
        upcoming = next(chunks, None)
        following = Product(head, hidden, upcoming, buffer, ahead) if upcoming else None
        if late_beyond.wait():
            raise UnlikelyTarget
        exponentials = product.exponentials[: chunk.count]
        _add_gradients(head, chunk, slopes, exponentials, place_of, active[: count.wait()], gradients)
        product = following
    return gradients


class Product:
    """First product of a chunk. Its number of rows, R, is rounded up to whole tiles.

    exponentials: [R, V] bfloat16.
    totals, weighted: [R, tiles] float32, each tile's sums of e^d and d e^d.
    of_rows: [3, R] float32, each row's inverse temperature, offset m, and logit of the target.
    """

    def __init__(self, head: Head, hidden: Tensor, chunk: Rows, buffer: Tensor, ahead: Tensor | None = None) -> None:
        """Start the product.

        ahead: memory for the first rows, which are computed at once, because `buffer` still holds another chunk. None: compute
            nothing yet.
        """
        self.chunk, self._head, self._hidden = chunk, head, hidden
        self.exponentials = buffer[: _whole(chunk.count)]
        num_rows, tiles = self.exponentials.shape[0], head.width // gemms.TILE
        self.totals, self.weighted = torch.empty(2, num_rows, tiles, dtype=torch.float32, device=hidden.device)
        self.of_rows = torch.empty(3, num_rows, dtype=torch.float32, device=hidden.device)
        self._filled = 0
        if ahead is not None:
            self._fill(ahead[:num_rows])

    def fill_rest(self, ahead: Tensor) -> None:
        """Copy the rows in `ahead` to the buffer, and compute the other rows there."""
        self.exponentials[: self._filled].copy_(ahead[: self._filled])
        self._fill(self.exponentials[self._filled :])

    def _fill(self, out: Tensor) -> None:
        begin, self._filled = self._filled, self._filled + out.shape[0]
        if begin == self._filled:
            return
        part, head = slice(begin, self._filled), self._head
        rows = self.chunk.part(begin, min(out.shape[0], self.chunk.count - begin))
        lacking = out.shape[0] - rows.count
        of_rows = self.of_rows[:, part]
        with on_device_of(self._hidden):
            triton_kernels.row_offsets[(out.shape[0],)](
                *(self._hidden, head.weight, self._hidden.shape[1], head.width, rows.count, rows.ids, rows.first),
                *(head.targets, head.inverse_temperature, head.inverse_temperature_of_all, of_rows, of_rows.stride(0)),
                BLOCK=1024,
            )
        gemms.exponentials(
            pad(rows.take(self._hidden), (0, 0, 0, lacking)),
            head.weight,
            of_rows[0],
            of_rows[1],
            pad(rows.take(head.targets), (0, lacking), value=-1),
            out,
            self.totals[part],
            self.weighted[part],
            of_rows[2],
        )


def finish(head: Head, chunk: Rows, statistics: Statistics, product: Product, is_beyond: Tensor) -> None:
    """Fill `statistics` at the chunk's rows.

    is_beyond: [1] int32, set to 1 if exponentials relative to a row's m overflow.
    """
    totals, of_rows, tiles = product.totals, product.of_rows, product.totals.shape[1]
    with on_device_of(totals):
        triton_kernels.finish_rows[(chunk.count,)](
            *(totals, product.weighted, tiles, head.width, of_rows, of_rows.shape[1], chunk.ids, chunk.first),
            *(head.targets, statistics.arrays, is_beyond),
            BLOCK=triton.next_power_of_2(tiles),
        )


def _add_gradients(
    head: Head,
    chunk: Rows,
    slopes: Slopes,
    exponentials: Tensor,
    place_of: Tensor,
    active: Tensor,
    gradients: HeadGradients,
) -> None:
    """Add dX and dW of the chunk's active rows, whose tokens are `active`.

    If at most half of the rows are active, they are copied to contiguous memory first.
    """
    count = active.shape[0]
    if count == 0:
        return
    is_packed = 2 * count <= chunk.count
    rows, of_rows = chunk, exponentials
    if is_packed:
        rows, of_rows = Rows(active, 0, count), exponentials.new_empty(count, head.width)
    v = torch.empty(rows.count, 1, dtype=torch.float32, device=exponentials.device)
    prepare(head, chunk, slopes, exponentials, place_of, of_rows, v)
    if gradients.wanted.hidden:
        gradients.put(rows, gradients.gemms.hidden_gradient(of_rows).mul_(v))
    if gradients.wanted.weight:
        hidden = rows.take(gradients.hidden)
        scaled = torch.mul(hidden, v, out=torch.empty_like(hidden))
        scaled.masked_fill_(v == 0, 0)  # also removes NaN in rows that are not active
        gradients.grad_weight = gradients.gemms.add_weight_gradient(gradients.grad_weight, of_rows, scaled)


def prepare(
    head: Head, chunk: Rows, slopes: Slopes, exponentials: Tensor, place_of: Tensor, of_rows: Tensor, v: Tensor
) -> None:
    """Compute a factor v per row, and change the exponentials so that v times them is dz.

    v: [n] float32, receives the factors. exponentials: [R, V], changed in place if of_rows is the same tensor. Otherwise of_rows,
    [n, V], receives the active rows.
    """
    with on_device_of(exponentials):
        triton_kernels.prepare_rows[(chunk.count, triton.cdiv(head.width, PIECE_COLUMNS))](
            *(exponentials, head.width, chunk.ids, chunk.first, head.targets),
            *(head.inverse_temperature, head.inverse_temperature_of_all),
            *(slopes.arrays, place_of, of_rows if of_rows is not exponentials else None, v),
            PIECE=PIECE_COLUMNS,
            BLOCK=1024,
        )


def _whole(num_rows: int) -> int:
    """Round a number of rows up to whole tiles of the first product."""
    return ceil(num_rows / DEVICE_ROW_MULTIPLE) * DEVICE_ROW_MULTIPLE
