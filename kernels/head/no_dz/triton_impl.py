"""dX and dW from exponentials, launched: tile sizes, and the lists of rows that stay on the device."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from marsrl.kernels.head.first_gemm.triton_impl import capability, plan_tiles
from marsrl.kernels.head.gradients import HeadGradients
from marsrl.kernels.head.no_dz.triton_kernels import add_target_rows, hidden_gradient, row_factors, weight_gradient
from marsrl.kernels.head.rows.statistics import Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.rows.triton_launches import list_places, token_arguments, with_padding
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import on_device_of


@dataclass(frozen=True)
class BackwardTiles:
    """A tile of the result is m by n; k is the depth of a step: columns for dX, where it divides m, rows for dW."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


FACTOR_ROWS, FACTOR_TILES = 128, 16
TARGET_UNITS = 1024


def plan_backward() -> BackwardTiles:
    """The tiles of dX and dW, the same for both; m of dW is the tile of columns whose exponentials share a power of two.

    On sm_90 the left operand goes from shared memory through registers: 252 of them for dX, 202 for dW, without spills; the
    rows of exponentials are listed ones, so that addresses are computed. On sm_80 128 x 256 would not fit. Compiled for both;
    not measured.
    """
    columns = plan_tiles(1, False).n
    return BackwardTiles(columns, 256 if capability() >= 90 else 128, 64, num_warps=8, num_stages=3)


@dataclass(frozen=True)
class _Places:
    """The rows that have a coefficient, side by side, in the order of the rows; `count` of them are filled."""

    count: Tensor  # [1] int32
    row: Tensor  # [R] int32
    token: Tensor  # [R] int64
    factor: Tensor  # [R] float32
    gradient: Tensor  # [R] float32
    target: Tensor  # [R] int32; the number of columns: none in this shard
    scales: Tensor  # [tiles, R] float32


class TritonBackwardGemms:
    """The products of dX and dW on the current stream; hidden states and weight in bfloat16."""

    def add_gradients(
        self,
        exponentials: Tensor,
        pieces: Tensor,
        rows: Rows,
        head: Head,
        statistics: Statistics,
        coefficient: Tensor,
        gradients: HeadGradients,
        compacts: bool,
    ) -> None:
        """Add what these rows have to dX and dW, from what TritonFirstGemm.exponentials has left of them.

        compacts: rows without a coefficient are left out; else they are multiplied by 0.
        """
        with on_device_of(exponentials):
            places = _places(pieces, rows, head, statistics, coefficient, compacts)
            if gradients.wanted.hidden:
                _add_hidden_gradient(exponentials, head, places, gradients)
            if gradients.wanted.weight:
                _add_weight_gradient(exponentials, head, places, gradients)


def _places(
    pieces: Tensor, rows: Rows, head: Head, statistics: Statistics, coefficient: Tensor, compacts: bool
) -> _Places:
    device, size, tiles = pieces.device, rows.count, pieces.shape[1]
    place_of, count = None, torch.full((1,), size, dtype=torch.int32, device=device)
    if compacts:
        active = torch.empty(size, dtype=torch.int64, device=device)
        place_of, count = list_places(rows, coefficient, coefficient, active)
    places = _Places(
        count,
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(size, dtype=torch.int64, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
        torch.full((size,), head.num_columns, dtype=torch.int32, device=device),
        torch.empty(tiles, size, dtype=torch.float32, device=device),
    )
    row_factors[(triton.cdiv(size, FACTOR_ROWS), triton.cdiv(max(1, tiles), FACTOR_TILES))](
        size,
        head.num_columns,
        *token_arguments(rows, head),
        pieces,
        pieces.shape[2],
        tiles,
        statistics.logprobs,
        statistics.maximum,
        statistics.log_sum,
        coefficient,
        place_of,
        places.row,
        places.token,
        places.factor,
        places.gradient,
        places.target,
        places.scales,
        BLOCK=FACTOR_ROWS,
        TILES=FACTOR_TILES,
    )
    return places


def _add_hidden_gradient(exponentials: Tensor, head: Head, places: _Places, gradients: HeadGradients) -> None:
    out, weight, of = gradients.of_hidden, head.weight, plan_backward()
    assert out is not None and out.is_contiguous(), "dX is written by row"
    if head.num_columns == 0:
        return
    num_rows, size = places.row.numel(), weight.shape[1]
    hidden_gradient[(triton.cdiv(num_rows, of.m) * triton.cdiv(size, of.n),)](
        with_padding(exponentials),
        exponentials.stride(0),
        weight,
        *weight.stride(),
        num_rows,
        head.num_columns,
        size,
        places.count,
        places.row,
        places.token,
        places.factor,
        places.gradient,
        places.target,
        places.scales,
        out,
        TILE=plan_tiles(1, False).n,
        BLOCK_M=of.m,
        BLOCK_N=of.n,
        BLOCK_K=of.k,
        IS_EVEN=exponentials.stride(0) % of.k == 0,
        WHOLE=size % of.n == 0,
        num_warps=of.num_warps,
        num_stages=of.num_stages,
    )


def _add_weight_gradient(exponentials: Tensor, head: Head, places: _Places, gradients: HeadGradients) -> None:
    total, adds = gradients.weight_total()
    hidden, of, factor = gradients.hidden, plan_backward(), gradients.wanted.factor
    num_rows, size = places.row.numel(), hidden.shape[1]
    weight_gradient[(triton.cdiv(head.width, of.m) * triton.cdiv(size, of.n),)](
        with_padding(exponentials),
        exponentials.stride(0),
        hidden,
        *hidden.stride(),
        num_rows,
        head.num_columns,
        head.width,
        size,
        places.count,
        places.row,
        places.token,
        places.factor,
        places.scales,
        total,
        factor,
        ADDS=adds,
        BLOCK_M=of.m,
        BLOCK_N=of.n,
        BLOCK_K=of.k,
        IS_EVEN=exponentials.stride(0) % of.m == 0,
        WHOLE=size % of.n == 0,
        num_warps=of.num_warps,
        num_stages=of.num_stages,
    )
    targets, order = places.target.sort(stable=True)
    add_target_rows[(num_rows, triton.cdiv(size, TARGET_UNITS))](
        order,
        torch.searchsorted(targets, targets),
        torch.searchsorted(targets, targets, right=True),
        places.target,
        places.token,
        places.gradient,
        head.num_columns,
        hidden,
        *hidden.stride(),
        size,
        total,
        factor,
        BLOCK=min(TARGET_UNITS, triton.next_power_of_2(size)),
    )
