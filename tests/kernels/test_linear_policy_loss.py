"""linear_policy_loss: the single pass and the recompute route against full logits and autograd in float64."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fused_head import arguments_for, chunks_of, compare_policy_loss, head_case, linear_policy_loss
from fused_head import run_policy_loss as run

from marsrl.kernels import PolicyObjective, linear_logprob
from marsrl.kernels.head import chunked_head, gemms, host_memory, tiles
from marsrl.kernels.head.rows.subset import Rows
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


@pytest.mark.parametrize("name", ["pseudo on-policy", "sequence ratio"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_grad_output_adds_dw_to_main_grad_as_it_is_formed(name, dtype, monkeypatch):
    chunks_of(9, monkeypatch)  # several products of each
    hidden, weight, targets = head_case()
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    arguments = arguments_for((hidden.detach(), weight.detach(), targets), name)
    expected, main_grad = torch.ones(2, *weight.shape).unbind()
    (2.5 * linear_policy_loss(hidden, weight, targets, **arguments, main_grad=expected).loss).backward()
    of_hidden, hidden.grad = hidden.grad, None
    seen = []
    gradients = linear_policy_loss_module.fused_loss
    monkeypatch.setattr(
        linear_policy_loss_module, "fused_loss", lambda *given: (seen.append(gradients(*given)), seen[-1])[1]
    )
    given = {**arguments, "main_grad": main_grad, "grad_output": 2.5}
    with torch.no_grad():
        linear_policy_loss(hidden, weight, targets, **given)
    assert (main_grad == 1).all()
    loss = linear_policy_loss(hidden, weight, targets, **given).loss
    assert seen[-1].gradients.of_weight is main_grad  # no other dW
    (2.5 * loss).backward()
    # the same products, added in another order
    torch.testing.assert_close(main_grad, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(hidden.grad, of_hidden) and weight.grad is None


def test_another_grad_output_than_was_told_is_an_error():
    hidden, weight, targets, arguments = simple()
    with pytest.raises(ValueError, match=r"grad_output is 1.0 without main_grad, expected None"):
        linear_policy_loss(hidden, weight, targets, **arguments, grad_output=1.0)
    loss = linear_policy_loss(
        hidden, weight, targets, **arguments, main_grad=torch.zeros_like(weight), grad_output=1.0
    ).loss
    with pytest.raises(RuntimeError, match=r"another grad_output than the 1.0 it was told: 2.0; main_grad holds 1.0"):
        (2 * loss).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_dw_is_rounded_once(dtype):
    values = torch.randn(40, 8)
    found = linear_policy_loss_module._scaled_to(values.clone(), torch.tensor(1.7), dtype)
    assert torch.equal(found, (values * 1.7).to(dtype))
    assert torch.equal(linear_policy_loss_module._scaled_to(values.clone(), 1.7, dtype), found)


def test_rows_of_dz_fill_whole_waves():
    assert chunked_head.whole_waves(33, 8, 132) == 33  # an H100 at H = 2048: 264 tiles
    assert chunked_head.whole_waves(31, 8, 108) == 27  # an A100: 216
    assert chunked_head.whole_waves(64, 16, 132) == 33  # H = 4096: 528
    assert chunked_head.whole_waves(1, 3, 132) == 1
    for at_most in range(1, 40):
        assert at_most // 2 < chunked_head.whole_waves(at_most, 10, 132) <= at_most


def test_the_buffer_of_dz_is_filled_to_the_last_row():
    """Chunks of logits are cut so that 4224 rows of dz are a whole number of them at Qwen's vocabulary."""
    rows = chunked_head._rows_of_dz(2 * 151936, torch.empty(0, 2048))
    chunk = chunked_head._device_rows(4 * 151936, chunked_head.DEVICE_LOGITS_BYTES)
    assert (rows, chunk) == (4224, 768)
    sizes = [each.count for each in Rows(None, 0, 10_000).chunks([768] * 5 + [384])]
    assert sizes == [768, 768, 768, 768, 768, 384] * 2 + [768, 768, 16] and sum(sizes[:6]) == rows


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


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_narrow_float32_products_that_the_process_asks_for_change_nothing(precision):
    """On a GPU these are TF32; here, where the processor has bfloat16, "medium" alone is off by 0.24 in such products."""
    case = head_case(40, 64, 300)
    arguments = arguments_for(case, "clip")
    expected, *gradients = run(case, arguments, torch.float32)
    torch.set_float32_matmul_precision(precision)
    try:
        found, *others = run(case, arguments, torch.float32)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.logprobs, expected.logprobs) and all(map(torch.equal, others, gradients))


@pytest.mark.parametrize("name", ["clip", "sequence ratio"])  # gradients in the forward; logits computed again
def test_every_product_is_asked_for_in_full_float32(name, monkeypatch):
    """By the setting at the product, whatever this machine makes of it."""
    seen = []

    def watched(function):
        def call(*given, **words):
            backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
            seen.append((function.__name__, *(backend.fp32_precision for backend in backends)))
            return function(*given, **words)

        return call

    for method in ("logits", "tile_logits", "hidden_gradient", "add_weight_gradient", "hidden_and_weight_gradient"):
        monkeypatch.setattr(gemms.HeadGemms, method, watched(getattr(gemms.HeadGemms, method)))
    case = head_case(40, 8, 300)
    arguments = arguments_for(case, name)
    torch.set_float32_matmul_precision("medium")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            run(case, arguments, dtype)
            linear_logprob(*(each.to(dtype).requires_grad_() for each in case[:2]), case[2]).logprobs.sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {each[0] for each in seen} >= {"logits", "tile_logits", "hidden_gradient", "hidden_and_weight_gradient"}
    assert {each[1:] for each in seen} == {("ieee", "ieee")}


def test_a_pytorch_without_float32_results_of_bfloat16_products_is_named(monkeypatch):
    reason = "torch 2.10.0 has no product of bfloat16 with a float32 result"
    monkeypatch.setattr(gemms, "why_no_narrow_products", lambda: reason)
    weight = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True)
    with pytest.raises(RuntimeError, match=f"a bfloat16 head on a GPU: {reason}; install torch 2.11 or later"):
        gemms.HeadGemms(weight, torch.bfloat16)
    gemms.HeadGemms(weight, torch.float32)


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
