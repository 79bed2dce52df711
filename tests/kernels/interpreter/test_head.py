"""The fused heads in Triton, interpreted, at sizes that NumPy bears: blocks and pieces so small that every loop takes turns."""

import pytest
from head_tests import BF16, FP32, HeadTests, Tier, use_device_chunks
from small_tiles import use_small_blocks

# one block with columns to spare; an odd vocabulary of several pieces; whole blocks; one column more
SHAPES = ((2, 8, 5), (7, 19, 333), (8, 16, 64), (9, 32, 65))


class TestRows(HeadTests):
    @pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
    def tier(self, request, monkeypatch):
        use_small_blocks(monkeypatch)
        return Tier("triton", (request.param,), (8, 8, 131), SHAPES, use_device_chunks)
