"""linear_policy_loss: the single pass and the recompute route against full logits and autograd in float64."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fused_head import (
    arguments_for,
    chunks_of,
    compare_policy_loss,
    head_case,
    linear_policy_loss,
)
from fused_head import run_policy_loss as run
from head_tests import Tier, weight_gradient
from head_tests import simple as without_mask
from policy_cases import OBJECTIVES
from torch.utils.checkpoint import checkpoint

from marsrl.kernels import linear_logprob
from marsrl.kernels.head import chunked_head, gemms, host_memory, tiles

TIER = Tier("cpu", (torch.float32,), (20, 16, 131), (), lambda *_: None)
simple = partial(without_mask, TIER)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("name", ["clip", "sequence ratio", "entropy bonus"])
def test_bfloat16_gradients_are_right_by_products_of_bfloat16_and_of_float32(name, rows, monkeypatch):
    """Whichever this CPU takes by itself. Statistics are float32 and the same to the bit."""
    chunks_of(rows, monkeypatch)
    monkeypatch.setattr(gemms, "HOST_TILE_ROWS", 50)
    case = head_case(vocab=160)  # a multiple of 32: else it takes float32 products
    arguments = arguments_for(case, name)
    found = []
    for each in (True, False):
        monkeypatch.setattr(gemms, "cpu_multiplies_bfloat16", lambda each=each: each)
        found.append(compare_policy_loss(case, arguments, torch.bfloat16))
    assert torch.equal(found[0].logprobs, found[1].logprobs) and torch.equal(found[0].loss, found[1].loss)


@pytest.mark.parametrize("name", ["clip", "sequence ratio"])
def test_chunks_that_cancel_leave_nothing_of_their_roundings_in_dw(name, monkeypatch):
    """The same tokens with opposite advantages in chunks of their own: each adds to dW, together they add nothing."""
    monkeypatch.setattr(gemms, "cpu_multiplies_bfloat16", lambda: True)
    chunks_of(30, monkeypatch)
    hidden, weight, targets = (
        each.bfloat16() if each.is_floating_point() else each for each in head_case(30, vocab=160)
    )
    arguments = {
        "objective": OBJECTIVES[name][0],
        "advantages": torch.tensor([1.0, -1.0]),
        "cu_seqlens": torch.tensor([0, 30, 60]),
        "normaliser": 1.0,
        "old_logprobs": linear_logprob(hidden, weight, targets).logprobs.repeat(2),
    }
    twice = hidden.repeat(2, 1), weight, targets.repeat(2)
    _, _, once = run(
        (hidden, weight, targets),
        {
            **arguments,
            "old_logprobs": arguments["old_logprobs"][:30],
            "advantages": torch.ones(1),
            "cu_seqlens": torch.tensor([0, 30]),
        },
        torch.bfloat16,
    )
    _, _, dw = run(twice, arguments, torch.bfloat16)
    assert once.abs().max() > 0 and dw.abs().max() <= 1e-4 * once.abs().max()


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


def test_rows_of_dz_fill_whole_waves():
    assert chunked_head.whole_waves(33, 8, 132) == 33  # an H100 at H = 2048: 264 tiles
    assert chunked_head.whole_waves(31, 8, 108) == 27  # an A100: 216
    assert chunked_head.whole_waves(1, 3, 132) == 1


OPS_AROUND = {
    "nothing": (lambda x: x, lambda y: y),
    "before": (lambda x: x.sin(), lambda y: y),
    "behind": (lambda x: x, lambda y: y.exp()),
    "both": (lambda x: x.sin(), lambda y: y.exp()),
}


@pytest.mark.parametrize("use_reentrant", [None, True, False])  # None: no checkpoint
@pytest.mark.parametrize("place", OPS_AROUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_gets_dw_once_under_activation_checkpointing(place, use_reentrant, dtype):
    before, behind = OPS_AROUND[place]
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
    exact = weight_gradient(before(hidden), weight, targets, arguments) * (
        loss.item() if place in ("behind", "both") else 1
    )
    torch.testing.assert_close(main_grad.double(), 2 * exact, rtol=0, atol=exact.abs().max().item() * DW_ERROR[dtype])


DW_ERROR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def test_two_heads_on_one_weight_add_to_one_main_grad():
    hidden, weight, targets, arguments = simple()
    main_grad = torch.zeros(weight.shape[::-1]).t()  # its rows are not contiguous
    first = linear_policy_loss(hidden, weight, targets, **arguments, main_grad=main_grad).loss
    second = linear_policy_loss(2 * hidden, weight, targets, **arguments, main_grad=main_grad).loss
    (first + 3 * second).backward()
    exact = weight_gradient(hidden, weight, targets, arguments) + 3 * weight_gradient(
        2 * hidden, weight, targets, arguments
    )
    torch.testing.assert_close(main_grad.double(), exact, atol=1e-6, rtol=1e-5)


def test_masked_rows_never_enter_the_first_gemm(monkeypatch):
    hidden, weight, targets, arguments = simple(40, mask=torch.arange(40) < 12)
    seen = []
    logits = gemms.HeadGemms.logits
    monkeypatch.setattr(
        gemms.HeadGemms, "logits", lambda self, x, out: (seen.append(x.shape[0]), logits(self, x, out))[1]
    )
    linear_policy_loss(hidden, weight, targets, **arguments).loss.backward()
    assert seen == [12]


def test_megatrons_flag_is_set_and_its_hooks_get_a_placeholder():
    hidden, weight, targets, arguments = simple()
    weight.grad_added_to_main_grad = False
    linear_policy_loss(hidden, weight, targets, **arguments, main_grad=torch.zeros_like(weight)).loss.backward()
    assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape


def test_a_compiled_caller_gets_the_same():
    hidden, weight, targets, arguments = simple()

    def step(hidden, weight):
        return linear_policy_loss(2 * hidden, weight, targets, **arguments).loss * 3

    step(hidden, weight).backward()
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    torch.compile(step, backend="eager")(hidden, weight).backward()
    assert torch.equal(hidden.grad, expected[0]) and torch.equal(weight.grad, expected[1])


@pytest.fixture(params=["high", "medium"])
def narrow(request):
    """The process lets float32 products round their operands: to TF32, to bfloat16."""
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)])
def test_a_head_whose_float32_products_would_be_rounded_is_refused(dtypes, narrow):
    hidden, weight, targets, arguments = simple()
    hidden, weight = hidden.detach().to(dtypes[0]), weight.detach().to(dtypes[1])
    reason = r"mkldnn.matmul.fp32_precision is '\w+', .*; call torch.set_float32_matmul_precision\('highest'\)"
    with pytest.raises(RuntimeError, match=reason):
        linear_policy_loss(hidden, weight, targets, **arguments)
    with pytest.raises(RuntimeError, match=reason):
        linear_logprob(hidden, weight, targets)


def test_a_setting_that_changes_before_the_backward_is_seen():
    hidden, weight, targets, _ = simple()
    out = linear_logprob(hidden, weight, targets)
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(RuntimeError, match="fp32_precision is 'bf16'"):
            out.logprobs.sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", ["clip", "sequence ratio"])  # gradients in the forward; logits computed again
def test_a_bfloat16_head_is_as_exact_whatever_the_process_lets_float32_products_do(name, narrow):
    case = head_case(40, 64, 300)
    compare_policy_loss(case, arguments_for(case, name), torch.bfloat16)


def test_no_call_changes_what_another_thread_computes_by(narrow, monkeypatch):
    """Four threads in heads at once, of which each looks at every product; torch's setting is one for the process."""
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
    arguments = arguments_for(case, "clip")

    def work(_):
        for _ in range(5):
            run(case, arguments, torch.bfloat16)
            linear_logprob(*(each.bfloat16().requires_grad_() for each in case[:2]), case[2]).logprobs.sum().backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert set(seen) == {expected} and settings() == expected and len(seen) > 40


def test_a_pytorch_without_float32_results_of_bfloat16_products_is_named(monkeypatch):
    reason = "torch 2.10.0 has no product of bfloat16 with a float32 result"
    monkeypatch.setattr(gemms, "why_no_narrow_products", lambda: reason)
    weight = SimpleNamespace(dtype=torch.bfloat16, is_cuda=True)
    with pytest.raises(RuntimeError, match=f"a bfloat16 head on a GPU: {reason}; install torch 2.11 or later"):
        gemms.HeadGemms(weight, torch.bfloat16)
    gemms.HeadGemms(weight, torch.float32)
