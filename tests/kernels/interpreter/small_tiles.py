"""The row kernels of the heads, cut so small that a few tokens and columns need many pieces and programs."""

import pytest

from marsrl.kernels.head.rows import triton_impl


def use_small_blocks(patch: pytest.MonkeyPatch) -> None:
    sizes = {"BLOCK_COLUMNS": 64, "PIECE_COLUMNS": 128, "JOIN_ELEMENTS": 16, "JOIN_PIECES": 2, "BLOCK_TOKENS": 4}
    for name, size in sizes.items():
        patch.setattr(triton_impl, name, size)
