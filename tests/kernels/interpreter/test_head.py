"""The fused heads in Triton, interpreted, at sizes that NumPy bears: with logits of the library, and by a product of our own.

Blocks, pieces and tiles are made small, so that every loop takes several turns: at production size one block holds all of
these vocabularies.
"""

import pytest
from head_tests import BF16, FP16, FP32, HeadTests, Tier, use_device_chunks
from small_tiles import in_chunks, use_small_tiles

from marsrl.kernels.head.first_gemm import triton_impl as first
from marsrl.kernels.head.rows import triton_impl

GEMM = "linear_policy_loss=triton_gemm,linear_logprob=triton_gemm"
# one block or tile with columns to spare; an odd vocabulary of several pieces; an H that no step divides; whole tiles
SHAPES = ((2, 8, 5), (7, 19, 333), (8, 16, 64), (9, 32, 65))


class TestRows(HeadTests):
    @pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
    def tier(self, request, monkeypatch):
        use_small_tiles(monkeypatch)
        monkeypatch.setattr(triton_impl, "BLOCK_COLUMNS", 64)
        monkeypatch.setattr(triton_impl, "PIECE_COLUMNS", 128)
        return Tier("triton", (request.param,), (8, 8, 131), SHAPES, use_device_chunks)


class TestFirstGemm(HeadTests):
    @pytest.fixture(params=[80, 90], ids=["by addresses", "by the copy engine"])
    def tier(self, request, monkeypatch):
        use_small_tiles(monkeypatch)
        monkeypatch.setattr(first, "capability", lambda: request.param)
        dtypes = (BF16,) if request.param == 80 else (BF16, FP16)
        return Tier(GEMM, dtypes, (14, 24, 131), SHAPES, lambda rows, patch, vocab: in_chunks(patch, rows, vocab))
