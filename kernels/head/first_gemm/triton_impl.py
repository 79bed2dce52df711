"""The first GEMM and the row kernel that reads its exponentials, launched: tile sizes, descriptors, strides."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from marsrl.kernels.head.first_gemm.triton_kernels import (
    exponential_gradients,
    first_product,
    first_product_by_copies,
)
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows.protocol import Slopes
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.head.rows.triton_impl import (
    BLOCK_COLUMNS,
    NUM_WARPS,
    PIECE_COLUMNS,
    TritonRowKernels,
    list_active,
    token_arguments,
    with_padding,
)
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import is_interpreted, num_multiprocessors, on_device_of

GROUP = 8  # row tiles whose hidden states share the L2 cache: 1024 rows are 4 MB at H = 2048


@dataclass(frozen=True)
class Tiles:
    """A tile of the logits is m rows by n columns; k is the depth of a step. parts: in which the epilogue takes it.

    max_registers: of a thread; None: as many as there are. programs: that share a multiprocessor.
    """

    m: int
    n: int
    k: int
    parts: int
    num_warps: int
    num_stages: int
    max_registers: int | None
    programs: int = 1


def plan_tiles(num_rows: int, copies: bool) -> Tiles:
    """By shape and GPU alone. n and k never vary: how a row is cut and summed up does not depend on those beside it.

    copies: by the copy engine of sm_90. Two programs then share a multiprocessor, in 128 registers a thread and half of
    the shared memory: while one takes exponentials and stores, the other multiplies. The kernel that computes
    addresses spills 80 bytes in 128 registers, so it has as many as there are; 128 x 256 spills in 255, with copies
    too (40 bytes at best), and Triton 3.6 cannot give loads and products warps of their own (warp_specialize) for
    tiles of 128 rows. Compiled for sm_80 and sm_90; not measured.
    """
    most, programs = (128, 2) if copies else (None, 1)
    if num_rows <= 64:
        return Tiles(64, 128, 64, 4, num_warps=4, num_stages=3, max_registers=most, programs=programs)
    return Tiles(128, 128, 64, 4, num_warps=8, num_stages=3, max_registers=most, programs=programs)


def capability() -> int:
    """Compute capability of the current device: 80, 90, ..."""
    if is_interpreted():
        return 90
    target: Any = driver.active.get_current_target()
    return int(target.arch)


@dataclass(frozen=True)
class Exponentials:
    """A product whose logits are gone. pieces: [4, n, R] float32: maximum, sum e^d, sum d e^d relative to it, and target
    logit, of n tiles of the columns. values: [R, V] e^(z / tau) / 2^k with one k of each row and tile, 0 at the target and
    in the tiles' padding; without columns where nobody wants gradients."""

    pieces: Tensor
    values: Tensor

    def __getitem__(self, rows: slice) -> "Exponentials":
        """The first rows; pieces may have more."""
        return Exponentials(self.pieces, self.values[rows])


class TritonFirstGemm(TritonRowKernels):
    """Row kernels whose logits never leave the first product, on the current stream.

        product = gemm.multiply(gemms, hidden, rows, head, out)       # out without columns: statistics alone
        gemm.statistics(product, rows, head, statistics)              # or partials, to a shard's part
        gemm.gradients(product, rows, head, slopes, dz, active)

    and gemm.gradients_at_once where statistics and coefficients are known beforehand. Hidden states and weight of one
    16-bit dtype.
    """

    @property
    def first_gemm(self) -> "TritonFirstGemm":
        return self

    def multiply(  # type: ignore[override]
        self, gemms: HeadGemms | None, hidden: Tensor, rows: Rows, head: Head, out: Tensor
    ) -> Exponentials:
        """The product of hidden [R, H] @ head.weight.T, in the memory of out [R, V], or [R, 0] for its pieces alone."""
        tiles = plan_tiles(rows.count, False)
        num_pieces = triton.cdiv(head.num_columns, tiles.n)
        pieces = torch.empty(4, num_pieces, rows.count, dtype=torch.float32, device=hidden.device)
        if pieces.numel():
            self._launch(hidden, rows, head, out if out.shape[1] else None, pieces, None)
        return Exponentials(pieces, out)

    def gradients_at_once(self, hidden: Tensor, rows: Rows, head: Head, slopes: Slopes, out: Tensor) -> None:
        """out [R, V] = dz as RowKernels.gradients has it, each row in its place, from statistics and coefficients [T] that
        are known: nothing else of the logits is written."""
        if head.num_columns == 0 or rows.count == 0:
            out.zero_()
            return
        self._launch(hidden, rows, head, out, None, slopes.arrays)

    def _launch(
        self,
        hidden: Tensor,
        rows: Rows,
        head: Head,
        out: Tensor | None,
        pieces: Tensor | None,
        known: tuple[Tensor, ...] | None,
    ) -> None:
        weight, columns, size = head.weight[: head.num_columns], head.num_columns, hidden.shape[1]
        with on_device_of(hidden):
            copies = capability() >= 90 and _can_be_copied(hidden) and _can_be_copied(weight)
            tiles = plan_tiles(rows.count, copies)
            # of dz what lies behind the real columns is 0 too
            column_tiles = triton.cdiv(out.stride(0) if known is not None and out is not None else columns, tiles.n)
            numbers = rows.count, columns, size, *token_arguments(rows, head)
            num_tiles = triton.cdiv(rows.count, tiles.m) * column_tiles
            if copies:
                grid = min(num_tiles, tiles.programs * num_multiprocessors(hidden))
                first_product_by_copies[(grid,)](
                    TensorDescriptor.from_tensor(hidden, [tiles.m, tiles.k]),
                    TensorDescriptor.from_tensor(weight, [tiles.n, tiles.k]),
                    *numbers,
                    _parts_of(out, tiles),
                    pieces,
                    known,
                    column_tiles,
                    GROUP=GROUP,
                    **_constants(tiles),
                )
                return
            first_product[(num_tiles,)](
                hidden,
                weight,
                *hidden.stride(),
                *weight.stride(),
                *numbers,
                None if out is None else with_padding(out),
                0 if out is None else out.stride(0),
                pieces,
                known,
                column_tiles,
                GROUP=GROUP,
                IS_EVEN=size % tiles.k == 0,
                **_constants(tiles),
            )

    def _pieces(self, product: Exponentials, rows: Rows, head: Head) -> Tensor:
        return product.pieces

    def gradients(
        self, product: Exponentials, rows: Rows, head: Head, slopes: Slopes, out: Tensor, active: Tensor | None
    ) -> LateCount:
        """As RowKernels.gradients. slopes.has_entropy costs a logarithm an element, two thirds of all instructions."""
        tile = plan_tiles(rows.count, False).n
        step = max(1, BLOCK_COLUMNS // tile)
        piece = max(step, PIECE_COLUMNS // tile)
        exponentials = product.values
        with on_device_of(exponentials):
            place_of, late = list_active(rows, slopes, active)
            exponential_gradients[(rows.count, triton.cdiv(out.stride(0), piece * tile))](
                *(with_padding(exponentials), exponentials.stride(0), head.num_columns),
                *token_arguments(rows, head),
                *(product.pieces, product.pieces.shape[2], slopes.arrays, place_of, with_padding(out), out.stride(0)),
                TILE=tile,
                TILES=min(step, triton.next_power_of_2(triton.cdiv(out.stride(0), tile))),
                PIECE=piece,
                HAS_ENTROPY=slopes.has_entropy,
                num_warps=NUM_WARPS,
            )
        return late

    def row_bytes(self, width: int) -> int:
        """Bytes of one row's pieces over so many columns; ranks with a shard of this width cut the same chunks by it."""
        return 16 * max(1, triton.cdiv(width, plan_tiles(1, False).n))


def _can_be_copied(matrix: Tensor) -> bool:
    """Whether the copy engine takes it: rows of neighbouring elements, each at a multiple of 16 bytes."""
    is_aligned = matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0
    return is_aligned and matrix.stride(1) == 1 and matrix.numel() > 0


def _parts_of(out: Tensor | None, tiles: Tiles) -> TensorDescriptor | None:
    """out [num_rows, V] with its padding, in the parts of a tile that the epilogue stores."""
    if out is None:
        return None
    return TensorDescriptor.from_tensor(with_padding(out), [tiles.m, tiles.n // tiles.parts])


def _constants(tiles: Tiles) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "PARTS": tiles.parts,
        "maxnreg": tiles.max_registers,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
