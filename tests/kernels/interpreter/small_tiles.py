"""The heads with products of their own, cut so small that a few tokens and columns need many tiles, programs and chunks."""

import pytest

from marsrl.kernels.head import chunked_head
from marsrl.kernels.head.first_gemm import triton_impl as first
from marsrl.kernels.head.rows import triton_impl

TILES = first.Tiles(8, 64, 16, parts=2, num_warps=4, num_stages=1, max_registers=None)


def use_small_tiles(patch: pytest.MonkeyPatch, tiles: first.Tiles = TILES) -> None:
    patch.setattr(first, "plan_tiles", lambda *_: tiles)
    patch.setattr(first, "num_multiprocessors", lambda _: 2)  # programs that take several tiles
    patch.setattr(first, "GROUP", 2)
    patch.setattr(first, "BLOCK_COLUMNS", 2 * tiles.n)
    patch.setattr(first, "PIECE_COLUMNS", 2 * tiles.n)
    patch.setattr(triton_impl, "JOIN_ELEMENTS", tiles.m)
    patch.setattr(triton_impl, "JOIN_PIECES", 2)
    patch.setattr(triton_impl, "BLOCK_TOKENS", tiles.m // 2)


def in_chunks(patch: pytest.MonkeyPatch, num_rows: int, vocab: int = 131) -> None:
    """Chunks of so many rows, whether exponentials are written or not; gradients of two wait for the backward GEMMs."""
    row_bytes = 2 * (-(-vocab // chunked_head.COLUMN_MULTIPLE) * chunked_head.COLUMN_MULTIPLE)
    patch.setattr(chunked_head, "DEVICE_ROW_MULTIPLE", 1)
    patch.setattr(chunked_head, "DEVICE_LOGITS_BYTES", num_rows * row_bytes)
    patch.setattr(chunked_head, "DEVICE_PIECES_BYTES", num_rows * 16 * -(-vocab // TILES.n))
    patch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", 2 * num_rows * row_bytes)
