"""dX and dW from exponentials, without dz, interpreted, with tiles so small that it needs many."""

import pytest
import torch
from fused_head import (
    arguments_for,
    compare_policy_loss,
    forced,
    head_case,
    linear_policy_loss,
    run_policy_loss,
    with_exact_logits,
)
from small_tiles import in_chunks, use_small_tiles

from marsrl.kernels import linear_logprob
from marsrl.kernels.head import chunked_head
from marsrl.kernels.head.first_gemm.triton_impl import TritonFirstGemm
from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.no_dz.triton_impl import TritonBackwardGemms

NAME = "linear_policy_loss=triton_no_dz"
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _small_and_by_name(monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", NAME)
    use_small_tiles(monkeypatch)


# gradient in the forward; clipped rows; KL; statistics first, and then dz after all
@pytest.mark.parametrize("name", ["pseudo on-policy", "clip", "k3", "sequence ratio"])
def test_an_objective_equals_its_definition(name, monkeypatch):
    in_chunks(monkeypatch, 3)  # 9 rows: a tile of rows and a row of the next
    case = head_case(14, 24)
    compare_policy_loss(case, arguments_for(case, name), BF16)


# one tile with columns to spare; an odd vocabulary; one more than tiles have; more targets of one column than a step has rows
@pytest.mark.parametrize("shape", [(2, 8, 5), (1, 19, 333), (17, 40, 65), (20, 16, 3)])
def test_shapes(shape):
    case = head_case(*shape)
    arguments = arguments_for(case, "k3")
    arguments["mask"][0] = True
    compare_policy_loss(case, arguments, BF16)


def test_without_compaction_the_results_are_the_same(monkeypatch):
    in_chunks(monkeypatch, 2)
    case = head_case(14, 8)
    compare_policy_loss(case, arguments_for(case, "strong gate", compacts=False), BF16)


def test_temperature_per_token_and_padded_vocabulary():
    hidden, weight, targets = head_case(8, 8, 144)
    weight[100:] = torch.nan  # the rest of a tile, and one of nothing else
    case = hidden, weight, targets % 100
    temperature = torch.rand(8) + 0.5
    arguments = arguments_for((hidden, weight[:100], case[2]), "clip", temperature=temperature)
    result, dx, dw = run_policy_loss(case, {**arguments, "real_vocab_size": 100}, BF16)
    alone, dx_alone, dw_alone = run_policy_loss((hidden, weight[:100], case[2]), arguments, BF16)
    assert torch.equal(result.logprobs, alone.logprobs) and not dw[100:].any()
    torch.testing.assert_close(dx, dx_alone)
    torch.testing.assert_close(dw[:100], dw_alone)
    case = hidden, weight.nan_to_num(50.0), case[2]
    compare_policy_loss(case, {**arguments, "real_vocab_size": 100}, BF16)


@pytest.mark.parametrize("scale", [30.0, 1000.0])  # |z| about 120, 4000
def test_large_logits_and_tiles_far_below_the_maximum(scale):
    hidden, weight, targets = head_case(6, 16, 200)
    case = torch.randn_like(hidden) * scale, weight, targets
    compare_policy_loss(case, arguments_for(case, "pseudo on-policy"), BF16)


def test_peaked_rows_and_the_last_column_and_probability_one():
    hidden, weight = torch.randn(12, 16), torch.randn(99, 16)
    weight[98] = 3 * hidden[0]
    hidden[1:6] = hidden[0] * torch.linspace(0.2, 4, 5)[:, None]
    case = hidden, weight, torch.full((12,), 98)
    found = compare_policy_loss(
        case, {**arguments_for(case, "no gate"), "mask": torch.ones(12, dtype=torch.bool)}, BF16
    )
    assert found.logprobs[5] == 0  # p = 1


def test_dz_is_never_written_and_the_host_waits_for_no_count(monkeypatch):
    for name in ("hidden_gradient", "add_weight_gradient"):
        monkeypatch.setattr(HeadGemms, name, lambda *_: pytest.fail("a product of the library"))
    monkeypatch.setattr(TritonFirstGemm, "gradients", lambda *_: pytest.fail("exponentials are turned into dz"))
    monkeypatch.setattr(chunked_head.LateCount, "__init__", lambda *_: pytest.fail("a count that the host is to read"))
    hidden, weight, targets = head_case(9, 8)
    hidden, weight = hidden.to(BF16).requires_grad_(), weight.to(BF16).requires_grad_()
    arguments = {**arguments_for((hidden.detach(), weight.detach(), targets), "clip"), "mask": None}
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert hidden.grad.any() and weight.grad.any()


def test_a_row_without_a_coefficient_is_not_multiplied():
    """Its exponentials are NaN here."""
    case = head_case(7, 8)
    arguments = {**arguments_for(case, "no gate"), "mask": None}
    arguments["advantages"] = arguments["advantages"].clone()
    arguments["advantages"][arguments["cu_seqlens"].diff().argmax()] = 0
    add, seen = TritonBackwardGemms.add_gradients, []

    def spoil(self, exponentials, pieces, rows, head, statistics, coefficient, *rest):
        exponentials[coefficient == 0] = torch.nan
        seen.append(int((coefficient == 0).sum()))
        add(self, exponentials, pieces, rows, head, statistics, coefficient, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonBackwardGemms, "add_gradients", spoil)
        _, dx, dw = run_policy_loss(case, arguments, BF16)
    assert 0 < sum(seen) < 7 and dx.isfinite().all() and dw.isfinite().all()


def test_main_grad_gets_what_a_gradient_of_its_own_would_be(monkeypatch):
    in_chunks(monkeypatch, 1)
    hidden, weight, targets = head_case(7, 8)
    arguments = arguments_for((hidden, weight, targets), "clip")
    _, dx, dw = run_policy_loss((hidden, weight, targets), arguments, BF16)
    leaves = hidden.to(BF16).requires_grad_(), weight.to(BF16).requires_grad_()
    main_grad = torch.ones(weight.shape)
    (3.0 * linear_policy_loss(*leaves, targets, **arguments, main_grad=main_grad, grad_output=3.0).loss).backward()
    torch.testing.assert_close(main_grad, 1 + dw.float(), atol=1e-6, rtol=2**-7)
    torch.testing.assert_close(leaves[0].grad, dx)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_inputs_get_no_gradient_and_the_other_the_same(frozen):
    hidden, weight, targets = head_case(9, 8)
    arguments = arguments_for((hidden, weight, targets), "clip")
    _, dx, dw = run_policy_loss((hidden, weight, targets), arguments, BF16, factor=1.0)
    hidden, weight = (
        each.to(BF16).requires_grad_(frozen != name) for name, each in (("hidden", hidden), ("weight", weight))
    )
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert hidden.grad is None if frozen == "hidden" else torch.equal(hidden.grad, dx)
    assert weight.grad is None if frozen == "weight" else torch.equal(weight.grad, dw)


def test_two_runs_give_the_same_bits():
    case = with_exact_logits(head_case(12, 8, 9))  # of which several rows have the same target
    arguments = arguments_for(case, "clip")
    first, dx, dw = run_policy_loss(case, arguments, BF16)
    again, dx_again, dw_again = run_policy_loss(case, arguments, BF16)
    assert torch.equal(first.loss, again.loss) and torch.equal(dx, dx_again) and torch.equal(dw, dw_again)


def test_a_row_that_is_nan_spoils_no_other_row():
    hidden, weight, targets = head_case(9, 8)
    arguments = {**arguments_for((hidden, weight, targets), "no gate"), "mask": torch.ones(9, dtype=torch.bool)}
    _, clean, _ = run_policy_loss((hidden, weight, targets), arguments, BF16)
    hidden[4, 3] = torch.nan
    result, dx, dw = run_policy_loss((hidden, weight, targets), arguments, BF16)
    others = torch.arange(9) != 4
    assert torch.equal(dx[others], clean[others]) and dx[4].isnan().all()
    assert dw.isnan().all() and result.loss.isnan()


def test_nothing_to_train_is_a_gradient_of_zero():
    hidden, weight, targets = head_case(5, 8)
    arguments = arguments_for((hidden, weight, targets), "pseudo on-policy")
    for changes in ({"advantages": torch.zeros(6)}, {"mask": torch.zeros(5, dtype=torch.bool)}):
        result, dx, dw = run_policy_loss((hidden, weight, targets), {**arguments, **changes}, BF16)
        assert result.loss == 0 and not dx.any() and not dw.any()


@pytest.mark.parametrize(
    "dtype, name, reason",
    [
        (BF16, "entropy bonus", "the entropy has a gradient, .* which needs the logits"),
        (torch.float16, "clip", "float16: exponentials in bfloat16 have 8 bits where float16 has 11"),
        (torch.float32, "clip", "tensor cores would round float32 to TF32"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(dtype, name, reason):
    case = head_case(4, 8)
    with pytest.raises(RuntimeError, match=f"triton_no_dz cannot serve this call of linear_policy_loss: .*{reason}"):
        run_policy_loss(case, arguments_for(case, name), dtype)
    hidden, weight, targets = head_case(4, 8)
    with forced("linear_logprob=triton_no_dz"), pytest.raises(RuntimeError, match="the entropy has a gradient"):
        linear_logprob(hidden.to(BF16), weight.to(BF16), targets)
