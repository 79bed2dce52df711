"""The fused heads and the objective alone in Triton, interpreted, at sizes that NumPy bears; every loop takes turns."""

import pytest
from clamp_cases import CASES, check_clamp
from fused_head import compare_policy_loss_of_logprobs
from head_tests import BF16, FP32, HeadTests, Tier, use_device_chunks
from policy_cases import OBJECTIVES

from marsrl.kernels.head.rows import triton_impl

# one block with columns to spare; an odd vocabulary of several pieces; whole blocks; one column more
SHAPES = ((2, 8, 5), (7, 19, 333), (8, 16, 64), (9, 32, 65))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    sizes = {"BLOCK_COLUMNS": 64, "PIECE_COLUMNS": 128, "JOIN_ELEMENTS": 16, "JOIN_PIECES": 2, "BLOCK_TOKENS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(triton_impl, name, size)


class TestRows(HeadTests):
    @pytest.fixture(params=[FP32, BF16], ids=["float32", "bfloat16"])
    def tier(self, request):
        return Tier("triton", request.param, (8, 8, 131), SHAPES, use_device_chunks)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name, 20)


@pytest.mark.parametrize("name", CASES)
def test_log_ratios_are_clamped_to_20_nats_and_counted(name):
    check_clamp(name, "triton")
