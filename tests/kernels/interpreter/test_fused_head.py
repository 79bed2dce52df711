"""The fused head in Triton, interpreted: beside test_head.py, the objective alone, and what only a device does."""

import pytest
import torch
from clamp_cases import CASES, check_clamp
from fused_head import (
    arguments_for,
    compare_policy_loss,
    compare_policy_loss_of_logprobs,
    head_case,
    policy_loss,
    run_policy_loss,
)
from head_tests import use_device_chunks
from policy_cases import OBJECTIVES
from small_tiles import use_small_blocks

from marsrl.kernels import PolicyObjective
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.linear_policy_loss import _add_scaled_

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    use_small_blocks(monkeypatch)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name, 20)


@pytest.mark.parametrize("name", CASES)
def test_log_ratios_are_clamped_to_20_nats_and_counted(name):
    check_clamp(name, "triton")


def test_gradients_of_bfloat16_are_formed_in_bfloat16(monkeypatch):
    seen = []
    gradient = HeadGemms.hidden_gradient
    monkeypatch.setattr(HeadGemms, "hidden_gradient", lambda self, dz: (seen.append(dz.dtype), gradient(self, dz))[1])
    case = head_case(9, 8)
    arguments = arguments_for(case, "clip")
    for dtype in DTYPES:
        compare_policy_loss(case, arguments, dtype)
    assert seen == DTYPES


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


def test_a_scale_that_stays_on_the_device_adds_the_same():
    total, values = torch.randn(2, 40, 8).unbind()
    expected = total + 2.5 * values
    _add_scaled_(total, values, torch.tensor(2.5))
    torch.testing.assert_close(total, expected)


def test_masked_logprobs_are_never_read():
    logprobs = torch.full((10,), torch.nan, requires_grad=True)
    result = policy_loss(
        logprobs,
        logprobs.detach(),
        objective=PolicyObjective(),
        token_advantages=logprobs.detach(),
        mask=torch.zeros(10, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 10]),
        normaliser=1.0,
    )
    result.loss.backward()
    assert result.loss.item() == 0 and not logprobs.grad.any() and not result.logprobs.any()


def test_the_tokens_of_a_mask_are_listed_before_their_number_is_known():
    mask = torch.tensor([False, True, True, False, True, False])
    rows = Rows.of(mask, 6, is_late=True)
    assert rows.count == 6 and rows.ids.tolist() == [1, 2, 4, 0, 3, 5] and rows.settled().ids.tolist() == [1, 2, 4]
    chunks = list(rows.chunks([2]))
    assert [chunk.settled().ids.tolist() for chunk in chunks] == [[1, 2], [4]]
    assert [chunk.settled().count for chunk in Rows.of(mask & False, 6, is_late=True).chunks([2])] == [0]
    assert LateCount(torch.tensor([7])).wait() == 7
