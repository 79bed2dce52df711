"""linear_policy_loss: the single pass and the recompute route against full logits and autograd in float64."""

import sys

import pytest
import torch
from fused_head import arguments_for, chunks_of, compare_policy_loss, head_case, linear_policy_loss
from fused_head import run_policy_loss as run

from marsrl.kernels import PolicyObjective
from marsrl.kernels.head import chunked_head, gemms, host_memory, tiles
from marsrl.kernels.testing import OBJECTIVES

PLAIN = PolicyObjective(mpt_probability=None)
linear_policy_loss_module = sys.modules["marsrl.kernels.linear_policy_loss"]  # the function hides it in the package


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_its_definition(name, dtype):
    case = head_case()
    compare_policy_loss(case, arguments_for(case, name), dtype)


# one row; around a chunk; a real odd vocabulary; two blocks of 4096 columns
@pytest.mark.parametrize(
    "shape", [(1, 8, 5), (15, 9, 33), (26, 12, 4099), (513, 8, 64), (3, 4, 152063), (3, 4, 151936)]
)
def test_shapes(shape):
    case = head_case(*shape)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    arguments["mask"][0] = True
    compare_policy_loss(case, arguments)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunk_size_is_not_seen_in_the_result(rows, name, dtype, monkeypatch):
    chunks_of(rows, monkeypatch)
    monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
    case = head_case()
    compare_policy_loss(case, arguments_for(case, name), dtype)


@pytest.mark.parametrize("capacity", [1, 2, 3, 7, 120])
def test_chunks_hold_every_row_once_and_are_of_one_size(capacity):
    for count in range(4 * capacity):
        sizes = host_memory.host_chunks(count, capacity)
        assert sum(sizes) == count and all(0 < size <= capacity for size in sizes)
        assert not sizes or max(sizes) - min(sizes) <= 1


# copies: of the float32 logits, that plain PyTorch holds at once (measured)
@pytest.mark.parametrize(("vocab", "copies"), [(32_000, 3.0), (151_936, 2.0)])
def test_the_logits_of_256_rows_are_below_a_quarter_of_what_plain_pytorch_holds(vocab, copies):
    assert min(256, chunked_head.HOST.rows(vocab)) <= 0.24 * copies * 256


@pytest.mark.parametrize(("vocab", "copies"), [(32_000, 4.0), (151_936, 2.5)])
def test_the_exponentials_of_256_rows_and_a_tile_are_below_a_quarter_of_what_plain_pytorch_holds(vocab, copies):
    assert tiles.EXPONENTIALS.rows(vocab, itemsize=2) >= 256  # all at once: one product gives dW
    logits, weight = 256 * gemms.HOST_TILE_ROWS, 256 * gemms.HOST_TILE_ROWS
    assert 256 * vocab / 2 + logits + weight <= 0.24 * copies * 256 * vocab


def test_one_product_gives_dw_at_the_dtype_of_the_weight_and_several_give_their_float32_sum(monkeypatch):
    hidden, weight, targets = head_case(60)
    arguments = {**arguments_for((hidden, weight, targets), "pseudo on-policy"), "mask": None}
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    seen = []
    backward = linear_policy_loss_module._FusedLoss.backward
    monkeypatch.setattr(
        linear_policy_loss_module._FusedLoss,
        "backward",
        staticmethod(lambda ctx, gradient: (seen.append(ctx.gradients.of_weight.dtype), backward(ctx, gradient))[1]),
    )
    for rows, main_grad in ((60, None), (10, None), (60, torch.zeros(weight.shape))):
        chunks_of(rows, monkeypatch)
        linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad).loss.backward()
    assert seen == [torch.bfloat16, torch.float32, torch.float32]


def test_more_tokens_than_a_grid_axis_has_programs():
    case = head_case(65537, 2, 5)
    arguments = arguments_for(case, "clip")
    arguments["mask"][-1] = True
    compare_policy_loss(case, arguments)


def test_temperature_per_token_and_padded_vocabulary():
    hidden, weight, targets = head_case(vocab=128)
    weight[100:] = 50.0
    targets = targets % 100
    case = hidden, weight, targets
    temperature = torch.rand(60) + 0.5
    arguments = arguments_for(case, "entropy bonus", temperature=temperature, real_vocab_size=100)
    compare_policy_loss(case, arguments)


def simple(num_tokens=20, **changes):
    """A batch without a mask: weights of supervised training, one sequence."""
    hidden, weight, targets = head_case(num_tokens)
    arguments = {
        "objective": PLAIN,
        "token_advantages": torch.randn(num_tokens),
        "cu_seqlens": torch.tensor([0, num_tokens]),
        "normaliser": 5.0,
        **changes,
    }
    return hidden.requires_grad_(), weight.requires_grad_(), targets, arguments


def test_no_tokens_is_a_loss_of_zero_with_gradients_of_zero():
    hidden, weight, targets, arguments = simple(0)
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert hidden.grad.shape == (0, 16) and not weight.grad.any()


def test_token_advantages_give_the_gradient_of_weighted_log_likelihood():
    hidden, weight, targets, arguments = simple()
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    expected = hidden.detach().double().requires_grad_()
    logp = torch.log_softmax(expected @ weight.detach().double().t(), -1).gather(1, targets[:, None])[:, 0]
    (-(arguments["token_advantages"] * logp).sum() / 5).backward()
    torch.testing.assert_close(hidden.grad.double(), expected.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["pseudo on-policy", "sequence ratio"])
def test_main_grad_is_written_once_a_backward_and_never_by_a_forward(name):
    case = head_case()
    arguments = arguments_for(case, name)
    hidden, weight, targets = case
    _, _, dw = run((hidden, weight, targets), arguments, torch.float32, factor=2.5)
    weight = weight.clone().requires_grad_()
    hidden = hidden.clone().requires_grad_()
    main_grad = torch.ones_like(weight)
    first = linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    with torch.no_grad():
        linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad)
    assert (main_grad == 1).all()
    (2.5 * first.loss).backward()
    torch.testing.assert_close(main_grad, 1 + dw, atol=1e-6, rtol=1e-5)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="second backward through one forward"):
        (2.5 * first.loss).backward()


def test_activation_recomputation_does_not_double_main_grad():
    hidden, weight, targets, arguments = simple()
    main_grad = torch.zeros_like(weight)

    def head(x):
        return linear_policy_loss(x, weight, targets, **arguments, main_grad=main_grad).loss

    head(hidden).backward()
    expected, main_grad_once = hidden.grad.clone(), main_grad.clone()
    hidden.grad = None
    main_grad.zero_()
    torch.utils.checkpoint.checkpoint(head, hidden, use_reentrant=True).backward()
    assert torch.equal(hidden.grad, expected) and torch.equal(main_grad, main_grad_once)


def test_megatrons_flag_is_set_and_its_hooks_get_a_placeholder():
    hidden, weight, targets, arguments = simple()
    weight.grad_added_to_main_grad = False
    linear_policy_loss(hidden, weight, targets, **arguments, main_grad=torch.zeros_like(weight)).loss.backward()
    assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_get_no_gradient(frozen):
    hidden, weight, targets, arguments = simple()
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    hidden.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    loss = linear_policy_loss(hidden, weight, targets, **arguments).loss
    assert loss.requires_grad == (frozen != "both")
    if frozen != "both":
        loss.backward()
    assert (hidden.grad is None) == (frozen != "weight") and (weight.grad is None) == (frozen != "hidden")
    if frozen == "weight":
        assert torch.equal(hidden.grad, expected[0])
    if frozen == "hidden":
        assert torch.equal(weight.grad, expected[1])


def test_rows_without_a_coefficient_never_enter_the_backward_gemms(monkeypatch):
    hidden, weight, targets, arguments = simple(40)
    arguments["token_advantages"][10:] = 0
    seen = []
    gradient = gemms.HeadGemms.hidden_gradient
    monkeypatch.setattr(
        gemms.HeadGemms, "hidden_gradient", lambda self, dz: (seen.append(dz.shape[0]), gradient(self, dz))[1]
    )
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert seen == [10] and not hidden.grad[10:].any() and hidden.grad[:10].any()


def test_masked_rows_never_enter_the_first_gemm(monkeypatch):
    hidden, weight, targets, arguments = simple(40, mask=torch.arange(40) < 12)
    seen = []
    logits = gemms.HeadGemms.logits
    monkeypatch.setattr(
        gemms.HeadGemms, "logits", lambda self, x, out: (seen.append(x.shape[0]), logits(self, x, out))[1]
    )
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert seen == [12]


@pytest.mark.parametrize("share", ["mask", "advantages"])
def test_nothing_to_train_is_a_loss_of_zero_with_gradients_of_zero(share):
    hidden, weight, targets, arguments = simple()
    if share == "mask":
        arguments["mask"] = torch.zeros(20, dtype=torch.bool)
    else:
        arguments["token_advantages"].zero_()
    result = linear_policy_loss(hidden, weight, targets, **arguments)
    result.loss.backward()
    assert result.loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_two_runs_give_the_same_bits():
    case = head_case(200, 16, 4099)
    arguments = arguments_for(case, "k3, entropy bonus, tis")
    first, dx, dw = run(case, arguments, torch.float32)
    again, dx_again, dw_again = run(case, arguments, torch.float32)
    assert torch.equal(first.loss, again.loss) and torch.equal(dx, dx_again) and torch.equal(dw, dw_again)
    assert all(torch.equal(first.agent_sums[name], again.agent_sums[name]) for name in first.agent_sums)


def test_a_compiled_caller_gets_the_same():
    hidden, weight, targets, arguments = simple()

    def step(hidden, weight):
        return linear_policy_loss(2 * hidden, weight, targets, **arguments).loss * 3

    step(hidden, weight).backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    torch.compile(step, backend="eager")(hidden, weight).backward()
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_autocast_changes_nothing():
    hidden, weight, targets, arguments = simple()
    expected = linear_policy_loss(hidden, weight, targets, **arguments).logprobs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = linear_policy_loss(hidden, weight, targets, **arguments)
        result.loss.backward()
    assert torch.equal(result.logprobs, expected) and hidden.grad.dtype == torch.float32


def test_non_contiguous_hidden_and_weight_give_the_same():
    hidden, weight, targets, arguments = simple()
    expected = linear_policy_loss(hidden, weight, targets, **arguments)
    strided = linear_policy_loss(
        hidden.detach().t().contiguous().t(), weight.detach().t().contiguous().t(), targets, **arguments
    )
    torch.testing.assert_close(strided.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


def test_a_wrong_target_or_main_grad_is_named():
    hidden, weight, targets, arguments = simple()
    with pytest.raises(ValueError, match=r"main_grad has dtype bfloat16, expected float32"):
        linear_policy_loss(hidden, weight, targets, **arguments, main_grad=torch.zeros_like(weight).bfloat16())
    targets[3] = 131
    with pytest.raises(ValueError, match=r"linear_policy_loss: targets\[3\] is 131, expected 0..130"):
        linear_policy_loss(hidden, weight, targets, **arguments)
