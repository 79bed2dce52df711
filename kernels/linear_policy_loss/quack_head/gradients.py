"""Gradients of the head from exponentials, chunk after chunk.

exponentials [R, V] bfloat16, and k, sum e^d, sum d e^d of each tile        gemms.py
statistics of the rows                                                      head/rows
terms.evaluate: coefficients of the objective                               head/rows
exponentials, scales u and row factors v that stand for dz                  triton_kernels.py
dX = v (u exponentials) @ weight,   dW += (u exponentials).T @ (v hidden)   gemms.py
"""

from math import ceil, log

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from marsrl.kernels.head.chunked_head import DEVICE_ROW_MULTIPLE, rows_of_dz
from marsrl.kernels.head.gradients import HeadGradients, Wanted
from marsrl.kernels.head.rows.protocol import PolicyTerms, Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.rows.triton_impl import PIECE_COLUMNS, TritonRowKernels, list_active
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.linear_policy_loss.quack_head import gemms, triton_kernels
from marsrl.kernels.triton_machine import on_device_of

SCALED_COLUMNS = 64  # a scale u covers so many
BLOCK = 64


def quack_gradients(
    kernels: TritonRowKernels,
    head: Head,
    hidden: Tensor,
    rows: Rows,
    statistics: Statistics,
    terms: PolicyTerms,
    wanted: Wanted,
) -> HeadGradients:
    """As chunked_head.policy_gradients; statistics.maximum is that of the logits over the temperature."""
    hidden = hidden.contiguous()
    gradients = HeadGradients(head, hidden, wanted)
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
    at_once = rows_of_dz(2 * head.width, hidden)
    buffer = torch.empty(min(at_once, _whole(rows.count)), head.width, dtype=torch.bfloat16, device=hidden.device)
    for chunk in rows.chunks([at_once]):
        chunk = chunk.settled()
        if chunk.count == 0:
            continue
        exponentials = buffer[: _whole(chunk.count)]
        maxima = _exponentials(head, chunk.take(hidden), chunk, statistics, kernels, exponentials)
        terms.evaluate(chunk)
        _add_gradients(head, chunk, slopes, exponentials, maxima, gradients)
    return gradients


def _exponentials(
    head: Head,
    hidden: Tensor,
    chunk: Rows,
    statistics: Statistics,
    kernels: TritonRowKernels,
    out: Tensor,
) -> Tensor:
    """k [R, tiles] float32; fills out, whose rows are whole tiles, and statistics at the rows of the chunk."""
    device, tiles, lacking = hidden.device, head.width // gemms.TILE, out.shape[0] - chunk.count
    maxima, totals, weighted = (torch.empty(out.shape[0], tiles, dtype=torch.float32, device=device) for _ in range(3))
    target_logits = torch.zeros(out.shape[0], dtype=torch.float32, device=device)
    gemms.exponentials(
        pad(hidden, (0, 0, 0, lacking)),
        head.weight,
        pad(head.inverse_temperature_at(chunk), (0, lacking)),
        pad(chunk.take(head.targets), (0, lacking), value=-1),
        out,
        maxima,
        totals,
        weighted,
        target_logits,
    )
    pieces = torch.zeros(4, tiles, chunk.count, dtype=torch.float32, device=device)
    torch.mul(maxima[: chunk.count].t(), log(2), out=pieces[0])
    pieces[1].copy_(totals[: chunk.count].t())
    torch.mul(weighted[: chunk.count].t(), log(2), out=pieces[2])
    pieces[3, 0] = target_logits[: chunk.count]
    kernels.finish(pieces, chunk, head, statistics)
    return maxima


def _add_gradients(
    head: Head,
    chunk: Rows,
    slopes: Slopes,
    exponentials: Tensor,
    maxima: Tensor,
    gradients: HeadGradients,
) -> None:
    """Add dX and dW of the chunk's rows that have a coefficient; they are packed where they are at most half of them."""
    active = torch.empty(chunk.count, dtype=torch.int64, device=exponentials.device)
    place_of, late = list_active(chunk, slopes, active)
    count = late.wait()
    if count == 0:
        return
    is_packed = 2 * count <= chunk.count
    rows = Rows(active[:count], 0, count) if is_packed else chunk
    of_rows = (
        torch.empty(_whole(count), head.width, dtype=torch.bfloat16, device=active.device)
        if is_packed
        else exponentials
    )
    of_rows[rows.count :].zero_()
    v, scales = prepared(head, chunk, slopes, exponentials, maxima, place_of, of_rows)
    hidden = gradients.hidden
    if gradients.wanted.hidden:
        of_hidden = torch.empty(of_rows.shape[0], hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        gemms.hidden_gradient(of_rows, scales, v, head.weight, of_hidden)
        gradients.put(rows, of_hidden[: rows.count])
    if gradients.wanted.weight:
        scaled = torch.zeros(of_rows.shape[0], hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        torch.mul(rows.take(hidden), v[: rows.count, None], out=scaled[: rows.count])
        scaled.masked_fill_(v[:, None] == 0, 0)  # a NaN of a row without a coefficient, too
        adds = gradients.of_weight is not None
        if gradients.of_weight is None:
            gradients.of_weight = torch.empty(head.weight.shape, dtype=torch.float32, device=hidden.device)
        gemms.weight_gradient(of_rows, scales, scaled, gradients.of_weight, adds)


def prepared(
    head: Head, chunk: Rows, slopes: Slopes, exponentials: Tensor, maxima: Tensor, place_of: Tensor, of_rows: Tensor
) -> tuple[Tensor, Tensor]:
    """v [n] float32 and scales u [V / SCALED_COLUMNS, n] bfloat16 of rows that stand for dz: exponentials [R, V] in place if that
    is of_rows [n, V], which otherwise receives those with a place. Both are 0 behind the rows."""
    num_rows, tiles, is_packed = of_rows.shape[0], maxima.shape[1], of_rows is not exponentials
    repeats = gemms.TILE // SCALED_COLUMNS
    v = torch.zeros(num_rows, dtype=torch.float32, device=maxima.device)
    scales = torch.zeros(tiles * repeats, num_rows, dtype=torch.bfloat16, device=maxima.device)
    with on_device_of(exponentials):
        triton_kernels.prepare_rows[(chunk.count, triton.cdiv(head.width, PIECE_COLUMNS))](
            *(exponentials, head.width, chunk.ids, chunk.first, head.targets),
            *(head.inverse_temperature, head.inverse_temperature_of_all, maxima, tiles),
            *(slopes.arrays, place_of, of_rows if is_packed else None, v),
            TILE=gemms.TILE,
            PIECE=PIECE_COLUMNS,
            BLOCK=1024,
        )
        triton_kernels.tile_scales[(triton.cdiv(chunk.count, BLOCK), triton.cdiv(tiles, BLOCK))](
            *(maxima, chunk.count, tiles, chunk.ids, chunk.first, head.targets),
            *(slopes.statistics.maximum, place_of, scales, num_rows),
            IS_PACKED=is_packed,
            TILE=gemms.TILE,
            REPEATS=repeats,
            BLOCK=BLOCK,
        )
    return v, scales


def _whole(num_rows: int) -> int:
    """Rows in whole tiles of the products."""
    return ceil(num_rows / DEVICE_ROW_MULTIPLE) * DEVICE_ROW_MULTIPLE
