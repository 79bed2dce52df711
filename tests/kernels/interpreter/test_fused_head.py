"""The fused head in Triton, interpreted: every objective and the hard cases, at sizes that NumPy bears.

Blocks and pieces are made small here, so that every loop takes several turns: at production size one block holds all of
these vocabularies.
"""

import pytest
import torch
from clamp_cases import CASES, check_clamp
from fused_head import (
    arguments_for,
    compare_logprob,
    compare_policy_loss,
    compare_policy_loss_of_logprobs,
    forced,
    head_case,
    linear_policy_loss,
    policy_loss,
    run_policy_loss,
    support_of,
    with_exact_logits,
)

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.head import chunked_head
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows import triton_impl
from marsrl.kernels.head.rows.subset import LateCount, Rows
from marsrl.kernels.linear_policy_loss import _add_scaled_
from marsrl.kernels.testing import OBJECTIVES

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(triton_impl, "BLOCK_COLUMNS", 64)
    monkeypatch.setattr(triton_impl, "PIECE_COLUMNS", 128)
    monkeypatch.setattr(triton_impl, "JOIN_ELEMENTS", 16)
    monkeypatch.setattr(triton_impl, "JOIN_PIECES", 2)
    monkeypatch.setattr(triton_impl, "BLOCK_TOKENS", 4)


def in_chunks(monkeypatch, rows, vocab=131, waiting=2):
    """Chunks of so many rows; gradients of `waiting` chunks wait for the backward GEMMs."""
    row_bytes = 4 * (-(-vocab // chunked_head.COLUMN_MULTIPLE) * chunked_head.COLUMN_MULTIPLE)
    monkeypatch.setattr(chunked_head, "DEVICE_ROW_MULTIPLE", 1)
    monkeypatch.setattr(chunked_head, "DEVICE_LOGITS_BYTES", rows * row_bytes)
    monkeypatch.setattr(chunked_head, "DEVICE_GRADIENT_BYTES", waiting * rows * row_bytes)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name, monkeypatch):
    in_chunks(monkeypatch, 5)
    case = head_case(8, 8)
    compare_policy_loss(case, arguments_for(case, name))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["k3, entropy bonus, tis", "sequence ratio"])
def test_columns_that_were_not_drawn_from_are_left_out(name, dtype, monkeypatch):
    in_chunks(monkeypatch, 7, vocab=333)
    case = head_case(12, 8, 333)  # pieces and blocks of which a row keeps nothing
    compare_policy_loss(case, arguments_for(case, name, support=support_of(case[2], 333, most=4)), dtype)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_of_given_logprobs_equals_its_definition(name):
    compare_policy_loss_of_logprobs(name, 20)


@pytest.mark.parametrize("name", CASES)
def test_log_ratios_are_clamped_to_20_nats_and_counted(name):
    check_clamp(name, "triton")


# one block; an odd vocabulary of several pieces; the largest that is interpreted
@pytest.mark.parametrize("shape", [(2, 8, 5), (7, 8, 333), (3, 4, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_and_dtypes(shape, dtype, monkeypatch):
    if shape[2] > 1000:
        monkeypatch.setattr(triton_impl, "BLOCK_COLUMNS", 512)
        monkeypatch.setattr(triton_impl, "PIECE_COLUMNS", 1024)
    case = head_case(*shape)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    arguments["mask"][0] = True
    compare_policy_loss(case, arguments, dtype)
    compare_logprob(case, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "k3, entropy bonus, strong gate"])
def test_without_compaction_the_results_are_the_same_and_no_count_comes_from_the_device(name, dtype, monkeypatch):
    in_chunks(monkeypatch, 3)
    counts = []
    make = LateCount.__init__
    monkeypatch.setattr(LateCount, "__init__", lambda self, value: (counts.append(value), make(self, value))[1])
    case = head_case(8, 8)
    compare_policy_loss(case, arguments_for(case, name, compacts=False), dtype)
    compare_logprob(case, dtype=dtype, compacts=False)
    assert counts and all(isinstance(count, int) for count in counts)


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("name", ["sequence ratio", "entropy bonus"])
def test_the_chunk_size_is_not_seen_in_the_result(rows, name, monkeypatch):
    """With exact logits: a library rounds products of one row otherwise than those of many, and a sequence's ratio has that
    rounding whole."""
    in_chunks(monkeypatch, rows, waiting=2)
    case = with_exact_logits(head_case(8, 8))
    compare_policy_loss(case, arguments_for(case, name))


def test_temperature_per_token_and_padded_vocabulary():
    hidden, weight, targets = head_case(8, 8, 128)
    weight[100:] = 50.0
    case = hidden, weight, targets % 100
    temperature = torch.rand(8) + 0.5
    compare_policy_loss(
        case, arguments_for(case, "entropy bonus", temperature=temperature, real_vocab_size=100), torch.bfloat16
    )
    found = compare_logprob(case, temperature, real=100)
    assert (found[3][100:] == 0).all()


@pytest.mark.parametrize("scale, temperature", [(30.0, 1.0), (1000.0, 1.3)])  # |z| about 120, 4000
def test_large_logits(scale, temperature):
    hidden, weight, targets = head_case(6, 16, 200)
    compare_logprob((torch.randn_like(hidden) * scale, weight, targets), temperature)


def test_peaked_rows_and_the_last_column_and_probability_one():
    hidden, weight = torch.randn(12, 16), torch.randn(99, 16)
    weight[98] = 3 * hidden[0]
    hidden[1:6] = hidden[0] * torch.linspace(0.2, 4, 5)[:, None]
    found = compare_logprob((hidden, weight, torch.full((12,), 98)))
    assert found[0][5] == 0 and found[1][5] < 1e-6  # p = 1


def test_a_logit_of_minus_infinity_has_no_probability_and_a_nan_stays_a_nan():
    hidden, weight, targets = torch.ones(2, 1), torch.randn(70, 1), torch.tensor([3, 4])
    weight[40:] = -torch.inf
    hidden[1] = torch.nan
    hidden.requires_grad_()
    weight.requires_grad_()
    out = linear_logprob(hidden, weight, targets)
    expected = torch.log_softmax(weight[:40, 0].detach(), 0)
    torch.testing.assert_close(out.logprobs[0], expected[3])
    torch.testing.assert_close(out.entropy[0], -(expected.exp() * expected).sum())
    assert out.logprobs[1].isnan() and out.entropy[1].isnan()
    (out.logprobs[0] + out.entropy[0]).backward()
    assert weight.grad[:40].isfinite().all() and not weight.grad[40:].any()


def simple(num_tokens=7, **changes):
    hidden, weight, targets = head_case(num_tokens, 8)
    arguments = {
        "objective": PolicyObjective(mpt_probability=None),
        "token_advantages": torch.randn(num_tokens),
        "cu_seqlens": torch.tensor([0, num_tokens]),
        "normaliser": torch.tensor(5.0),
        **changes,
    }
    return hidden.requires_grad_(), weight.requires_grad_(), targets, arguments


@pytest.mark.parametrize("case", ["no tokens", "all masked", "no advantage"])
def test_nothing_to_train_is_a_loss_of_zero_with_gradients_of_zero(case):
    hidden, weight, targets, arguments = simple(0 if case == "no tokens" else 7)
    if case == "all masked":
        arguments["mask"] = torch.zeros(7, dtype=torch.bool)
    if case == "no advantage":
        arguments["token_advantages"].zero_()
    result = linear_policy_loss(hidden, weight, targets, **arguments)
    result.loss.backward()
    assert result.loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    assert all(values.shape == (1,) and values.isfinite().all() for values in result.agent_sums.values())


def test_rows_without_a_coefficient_never_enter_the_backward_gemms(monkeypatch):
    in_chunks(monkeypatch, 4)
    hidden, weight, targets, arguments = simple(13, mask=torch.arange(13) != 2)
    arguments["token_advantages"][5:11] = 0
    seen = []
    gradient = HeadGemms.hidden_gradient
    monkeypatch.setattr(
        HeadGemms, "hidden_gradient", lambda self, dz: (seen.append(dz.shape[0]), gradient(self, dz))[1]
    )
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert sum(seen) == 6 and not hidden.grad[5:11].any() and hidden.grad[3:5].any()


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

    in_chunks(monkeypatch, 3)
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


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient_and_the_other_the_same(frozen):
    hidden, weight, targets, arguments = simple()
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert hidden.grad is None if frozen == "hidden" else torch.equal(hidden.grad, expected[0])
    assert weight.grad is None if frozen == "weight" else torch.equal(weight.grad, expected[1])


@pytest.mark.parametrize("name", ["pseudo on-policy", "sequence ratio"])
def test_main_grad_is_written_once_a_backward_and_never_by_a_forward(name):
    hidden, weight, targets = head_case(6, 8)
    arguments = arguments_for((hidden, weight, targets), name)
    _, _, dw = run_policy_loss((hidden, weight, targets), arguments, torch.float32, factor=2.5)
    weight.requires_grad_()
    main_grad = torch.ones_like(weight)
    first = linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    with torch.no_grad():
        linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    assert (main_grad == 1).all()
    (2.5 * first.loss).backward()
    torch.testing.assert_close(main_grad, 1 + dw, atol=1e-6, rtol=1e-5)
    assert weight.grad is None and not first.logprobs.requires_grad and not first.coefficient.requires_grad


def test_a_scale_that_stays_on_the_device_adds_the_same():
    total, values = torch.randn(2, 40, 8).unbind()
    expected = total + 2.5 * values
    _add_scaled_(total, values, torch.tensor(2.5))
    torch.testing.assert_close(total, expected)


def test_two_runs_give_the_same_bits(monkeypatch):
    in_chunks(monkeypatch, 5)
    case = head_case(12, 8)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    first, dx, dw = run_policy_loss(case, arguments, torch.float32)
    again, dx_again, dw_again = run_policy_loss(case, arguments, torch.float32)
    assert torch.equal(first.loss, again.loss) and torch.equal(dx, dx_again) and torch.equal(dw, dw_again)
    assert all(torch.equal(first.agent_sums[name], again.agent_sums[name]) for name in first.agent_sums)


def test_the_statistics_of_a_row_do_not_depend_on_the_rows_beside_it(monkeypatch):
    hidden, weight, targets = with_exact_logits(head_case(8, 8))  # no library promises that of the others
    whole = linear_logprob(hidden, weight, targets)
    in_chunks(monkeypatch, 3)
    assert torch.equal(linear_logprob(hidden, weight, targets).logprobs, whole.logprobs)


def test_non_contiguous_inputs_give_the_same():
    hidden, weight, targets, arguments = simple()
    expected = linear_policy_loss(hidden, weight, targets, **arguments)
    strided = linear_policy_loss(
        hidden.detach().t().contiguous().t(),
        weight.detach().t().contiguous().t(),
        targets.repeat_interleave(2)[::2],
        **{**arguments, "token_advantages": arguments["token_advantages"].repeat_interleave(2)[::2]},
    )
    torch.testing.assert_close(strided.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(strided.coefficient, expected.coefficient)


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


def test_the_cpu_library_and_triton_agree():
    case = head_case(9, 8)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    found, dx, dw = run_policy_loss(case, arguments, torch.float32)
    with forced("cpu"):
        expected, dx_expected, dw_expected = run_policy_loss(case, arguments, torch.float32)
    for field in ("loss", "logprobs", "entropy", "coefficient"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dx, dx_expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(dw, dw_expected, atol=1e-6, rtol=1e-5)
