"""The fused heads by csrc/cpu, which makes dz of float32 models in place of logits and takes a bfloat16 one tile by tile."""

import pytest
from fused_head import chunks_of
from head_tests import BF16, FP32, HeadTests, Tier

from marsrl.kernels.head import gemms

# one row; around a chunk; odd vocabularies; two blocks of 4096 columns; more rows than a grid axis has programs
SHAPES = (
    *((1, 9, 5), (15, 9, 33), (26, 12, 4099), (513, 8, 64), (3, 4, 152063), (3, 4, 151936), (65537, 2, 5)),
)  # fmt: skip


class TestHead(HeadTests):
    @pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
    def tier(self, request, monkeypatch):
        monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
        return Tier("cpu", (request.param,), (60, 16, 131), SHAPES, lambda rows, patch, vocab: chunks_of(rows, patch))
