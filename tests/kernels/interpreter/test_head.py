"""The fused heads and the objective alone in Triton, interpreted, at sizes that NumPy bears; every loop takes turns."""

import pytest
import torch
from clamp_cases import CASES, check_clamp
from fused_head import arguments_for, compare_policy_loss_of_logprobs, head_case, run_policy_loss
from head_tests import BF16, FP32, HeadTests, Tier, use_device_chunks
from policy_cases import OBJECTIVES

from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows import triton_impl
from marsrl.kernels.head.rows.subset import LateCount, Rows

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
        return Tier("triton", (request.param,), (8, 8, 131), SHAPES, use_device_chunks)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name, 20)


@pytest.mark.parametrize("name", CASES)
def test_log_ratios_are_clamped_to_20_nats_and_counted(name):
    check_clamp(name, "triton")


def test_the_gemms_of_a_gpu_get_the_right_factors(monkeypatch):
    """bfloat16 pairs with float32 results exist on CUDA only: stand-ins of the same signature take their place."""

    def mm(a, b, *, out_dtype, out):
        assert a.dtype == b.dtype == torch.bfloat16 and out.dtype == out_dtype == torch.float32
        return out.copy_(a.float() @ b.float())

    def addmm(total, a, b, *, out_dtype, out):
        assert out is total
        return out.add_(a.float() @ b.float())

    make = HeadGemms.__init__

    def make_for_gpu(self, weight, hidden_dtype):
        make(self, weight, hidden_dtype)
        self._multiplies_narrow = True

    use_device_chunks(3, monkeypatch, 131)
    case = head_case(8, 8)
    arguments = arguments_for(case, "clip")
    hidden, weight, targets = case
    narrow = hidden.bfloat16(), weight.bfloat16(), targets
    expected = run_policy_loss(narrow, arguments, torch.bfloat16)
    monkeypatch.setattr(HeadGemms, "__init__", make_for_gpu)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    found = run_policy_loss(narrow, arguments, torch.bfloat16)
    for gradient, wanted in zip(found[1:], expected[1:]):
        torch.testing.assert_close(gradient, wanted)


def test_the_tokens_of_a_mask_are_listed_before_their_number_is_known():
    mask = torch.tensor([False, True, True, False, True, False])
    rows = Rows.of(mask, 6, is_late=True)
    assert rows.count == 6 and rows.ids.tolist() == [1, 2, 4, 0, 3, 5] and rows.settled().ids.tolist() == [1, 2, 4]
    chunks = list(rows.chunks([2]))
    assert [chunk.settled().ids.tolist() for chunk in chunks] == [[1, 2], [4]]
    assert [chunk.settled().count for chunk in Rows.of(mask & False, 6, is_late=True).chunks([2])] == [0]
    assert LateCount(torch.tensor([7])).wait() == 7
