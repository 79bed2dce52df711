"""linear_policy_loss: the single pass and the recompute route against full logits and autograd in float64."""

import pytest
import torch
from fused_head import (
    arguments_for,
    chunks_of,
    compare_policy_loss,
    head_case,
    linear_policy_loss,
    support_of,
    with_exact_logits,
)
from fused_head import run_policy_loss as run
from test_head import simple, weight_gradient
from torch.utils.checkpoint import checkpoint

from marsrl.kernels import linear_logprob
from marsrl.kernels.head import gemms
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
def test_bfloat16_gradients_are_right_with_either_product(name, rows, monkeypatch):
    """Test bfloat16 and float32 matrix products; a CPU normally uses one kind. Statistics are float32 and bitwise equal."""
    chunks_of(rows, monkeypatch)
    monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
    case = head_case(vocab=160)  # a multiple of 32, because other sizes always use float32 products
    arguments = arguments_for(case, name)
    results = []
    for each in (True, False):
        monkeypatch.setattr(gemms, "cpu_multiplies_bfloat16", lambda each=each: each)
        results.append(compare_policy_loss(case, arguments, torch.bfloat16))
    assert torch.equal(results[0].logprobs, results[1].logprobs) and torch.equal(results[0].loss, results[1].loss)


def test_a_torch_that_lists_no_instructions_multiplies_float32(monkeypatch):
    gemms.cpu_multiplies_bfloat16.cache_clear()
    with monkeypatch.context() as older:
        older.delattr(torch.cpu, "get_capabilities")
        assert not gemms.cpu_multiplies_bfloat16()
    gemms.cpu_multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize("use_reentrant", [None, True, False])  # None: no checkpointing
@pytest.mark.parametrize("before", [torch.clone, torch.sin])
@pytest.mark.parametrize("behind", [torch.clone, torch.exp])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_dw_once_under_activation_checkpointing(before, behind, use_reentrant, dtype):
    hidden, weight, targets, arguments = simple()
    hidden, weight = (each.detach().to(dtype).requires_grad_() for each in (hidden, weight))
    main_grad = torch.zeros(weight.shape)

    def step(x):
        return behind(linear_policy_loss(before(x), weight, targets, **arguments, main_grad=main_grad).loss)

    for _ in range(2):  # micro-batches
        loss = step(hidden) if use_reentrant is None else checkpoint(step, hidden, use_reentrant=use_reentrant)
        assert loss.requires_grad
        kept = main_grad.clone()
        loss.backward()
        assert not torch.equal(main_grad, kept)
    exact = weight_gradient(before(hidden), weight, targets, arguments) * (loss.item() if behind == torch.exp else 1)
    error = exact.abs().max().item() * (1e-6 if dtype == torch.float32 else 1e-2)
    torch.testing.assert_close(main_grad.double(), 2 * exact, rtol=0, atol=error)


@pytest.fixture(params=["high", "medium"])
def narrow(request):
    """Make PyTorch round the operands of float32 products to TF32 or bfloat16, as a user may set."""
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)])
def test_a_head_refuses_reduced_precision_float32_products(dtypes, narrow):
    hidden, weight, targets, arguments = simple()
    hidden, weight = hidden.detach().to(dtypes[0]), weight.detach().to(dtypes[1])
    reason = r"mkldnn.matmul.fp32_precision is '\w+', .*; call torch.set_float32_matmul_precision\('highest'\)"
    with pytest.raises(RuntimeError, match=reason):
        linear_policy_loss(hidden, weight, targets, **arguments)
    with pytest.raises(RuntimeError, match=reason):
        linear_logprob(hidden, weight, targets)


# The first computes gradients in the forward, the second recomputes logits.
@pytest.mark.parametrize("name", ["clip", "sequence ratio"])
def test_a_bfloat16_head_ignores_float32_product_settings(name, narrow):
    case = head_case(40, 64, 300)
    compare_policy_loss(case, arguments_for(case, name), torch.bfloat16)


def test_no_call_changes_settings_of_other_threads(narrow, monkeypatch):
    """PyTorch's precision setting is global in the process, so an op must not change it, not even during a product."""
    seen = []

    def settings():
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends
        return tuple(each.fp32_precision for each in backends), torch.get_num_threads(), torch.get_default_dtype()

    def watched(function):
        def call(*given, **words):
            seen.append(settings())
            return function(*given, **words)

        return call

    for method in ("logits", "tile_logits", "hidden_gradient", "add_weight_gradient", "hidden_and_weight_gradient"):
        monkeypatch.setattr(gemms.HeadGemms, method, watched(getattr(gemms.HeadGemms, method)))
    expected = settings()
    case = head_case(40, 8, 300)
    run(case, arguments_for(case, "clip"), torch.bfloat16)
    linear_logprob(*(each.bfloat16().requires_grad_() for each in case[:2]), case[2]).logprobs.sum().backward()
    assert set(seen) == {expected} and settings() == expected


def test_mixed_dtypes_give_the_log_prob_of_the_exact_numbers():
    hidden, weight, targets = torch.randn(20, 8).bfloat16(), torch.randn(70, 8), torch.randint(0, 70, (20,))
    mixed = linear_logprob(hidden, weight, targets)
    exact, _ = linear_logprob_reference(hidden.double(), weight.double(), targets, 1.0, 70)
    torch.testing.assert_close(mixed.logprobs.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_change_results(dtype, name):
    case = with_exact_logits(head_case(20, 8, 8197))  # more logits than one thread handles alone
    arguments, results = arguments_for(case, name), []
    for count in (1, 3):
        torch.set_num_threads(count)
        result, *_ = run(case, arguments, dtype)
        results.append([result.loss, result.logprobs, result.entropy, result.coefficient])
    assert all(map(torch.equal, *results))


def test_a_support_gives_the_softmax_over_its_columns():
    """Compare with the definition, row by row."""
    columns = 131  # the remaining columns are padding
    hidden, weight, targets = head_case(40, 16, 160)
    targets, heat = targets % columns, torch.rand(40).double() + 0.5
    leaves = [each.double().requires_grad_() for each in (hidden, weight)]
    support = support_of(targets, columns)
    logprobs, entropy = linear_logprob_reference(*leaves, targets, heat, columns, support)
    expected = []
    for row, (start, count) in enumerate(zip(support.starts.tolist(), support.counts.tolist())):
        ids = support.ids[start : start + count].long() if count else torch.arange(columns)
        share = torch.softmax(leaves[1][ids] @ leaves[0][row] / heat[row], 0)
        expected.append(torch.stack((share[ids == targets[row]][0].log(), -(share * share.log()).sum())))
    actual, expected = torch.stack((logprobs, entropy), 1), torch.stack(expected)
    torch.testing.assert_close(actual, expected)
    upstream = torch.randn(40, 2).double()
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, upstream) for each in (actual, expected)))
