"""The first GEMM with its statistics, launched: tile sizes, descriptors, and the row kernels that go with it."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from marsrl.kernels.head.first_gemm.triton_kernels import logits_and_pieces
from marsrl.kernels.head.rows.protocol import FirstGemm, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.rows.triton_impl import TritonRowKernels, put_statistics, shard_partials, token_arguments
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.triton_machine import is_interpreted, on_device_of

GROUP = 8  # row tiles whose hidden states share the L2 cache: 1024 rows are 4 MB at H = 2048


@dataclass(frozen=True)
class Tiles:
    """A tile of the logits is m rows by n columns; k is the depth of a step. parts: in which the epilogue takes it.

    max_registers: of a thread; None: as many as there are.
    """

    m: int
    n: int
    k: int
    parts: int
    num_warps: int
    num_stages: int
    max_registers: int | None


def plan_tiles(num_rows: int) -> Tiles:
    """By shape and GPU alone. n and k never vary: how a row is cut and summed up does not depend on those beside it.

    On sm_90 two programs share a multiprocessor, in 128 registers a thread and 96 KiB of shared memory: while one takes
    exponentials and stores, the other multiplies. For that the epilogue takes a tile in four parts: in one it spills 64
    bytes a thread. 128 x 256, one program a multiprocessor, spills 104. On sm_80, whose operands pass through
    registers, 128 are too few (232 bytes). Compiled for both; not measured.
    """
    max_registers = 128 if _capability() >= 90 else None
    if num_rows <= 64:
        return Tiles(64, 128, 64, 4, num_warps=4, num_stages=3, max_registers=max_registers)
    return Tiles(128, 128, 64, 4, num_warps=8, num_stages=3, max_registers=max_registers)


def _capability() -> int:
    """Of the current device: 80, 90, ..."""
    if is_interpreted():
        return 90
    target: Any = driver.active.get_current_target()
    return int(target.arch)


class TritonFirstGemm:
    """FirstGemm on the current stream; hidden states and weight of one 16-bit dtype."""

    def logits(self, hidden: Tensor, rows: Rows, head: Head, out: Tensor | None) -> Tensor:
        weight, columns = head.weight, head.num_columns
        with on_device_of(hidden):
            tiles = plan_tiles(rows.count)
        column_tiles = triton.cdiv(columns, tiles.n)
        pieces = torch.empty(4, column_tiles, rows.count, device=hidden.device)
        num_programs = triton.cdiv(rows.count, tiles.m) * column_tiles
        if num_programs == 0:
            return pieces
        with on_device_of(hidden):
            logits_and_pieces[(num_programs,)](
                hidden,
                weight,
                *hidden.stride(),
                *weight.stride(),
                out,
                0 if out is None else out.stride(0),
                rows.count,
                columns,
                hidden.shape[1],
                *token_arguments(rows, head),
                pieces,
                GROUP=GROUP,
                **_constants(tiles, hidden.shape[1]),
            )
        return pieces

    def statistics(self, pieces: Tensor, rows: Rows, head: Head, out: Statistics) -> None:
        put_statistics(pieces, rows, head, out)

    def partials(self, pieces: Tensor, rows: Rows, head: Head) -> Tensor:
        return shard_partials(pieces, rows, head)

    def row_bytes(self, width: int) -> int:
        return 16 * max(1, triton.cdiv(width, plan_tiles(1).n))


class TritonGemmRowKernels(TritonRowKernels):
    """TritonRowKernels with the product of our own before them."""

    first_gemm: FirstGemm | None = TritonFirstGemm()


def _constants(tiles: Tiles, size: int) -> dict[str, Any]:
    return {
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "PARTS": tiles.parts,
        "IS_EVEN": size % tiles.k == 0,
        "maxnreg": tiles.max_registers,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
