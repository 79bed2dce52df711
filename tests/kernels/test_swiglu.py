"""swiglu: csrc/cpu and the reference against autograd in float64."""

import pytest
import torch
from swiglu_cases import compare, eager

from marsrl.kernels import swiglu

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("shape, width", [((5,), 7), ((1,), 1), ((40,), 96), ((3, 1), 1030)])
@pytest.mark.parametrize("has_weights", [True, False])
def test_it_is_as_exact_as_plain_pytorch(shape, width, has_weights, implementation, dtype, monkeypatch):
    if (implementation, dtype) == ("cpu", torch.float16):
        implementation = "reference"  # csrc/cpu has no float16
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare(shape, width, dtype, has_weights=has_weights)
    compare(shape, width, dtype, has_weights=has_weights, scale=60.0)  # gates beyond e^88


def test_gates_far_out_are_shut_or_open():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 200.0, 1e30])
    products = torch.cat((gate, torch.ones(6))).requires_grad_()
    out = swiglu(products[None])[0]
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 1e30]), atol=1e-8, rtol=1e-6)
    out.sum().backward()
    torch.testing.assert_close(products.grad[:6], torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0]), atol=1e-8, rtol=1e-6)


def test_a_nan_stays_in_its_row():
    products = torch.randn(4, 10)
    products[2, 3] = torch.nan
    assert swiglu(products).isnan().any(dim=1).tolist() == [False, False, True, False]


def test_no_rows_and_rows_that_do_not_lie_side_by_side():
    empty = torch.randn(0, 6, requires_grad=True)
    swiglu(empty, torch.randn(0)).sum().backward()
    assert empty.grad.shape == (0, 6)
    strided, weights = torch.randn(6, 5).t().requires_grad_(), torch.rand(10)[::2].requires_grad_()
    out = swiglu(strided, weights)
    torch.testing.assert_close(out, eager(strided, weights))
    out.sum().backward()  # an expanded gradient
    assert strided.grad.shape == (5, 6) and weights.grad.shape == (5,)


def test_only_what_is_wanted_has_a_gradient_and_in_its_dtype():
    products, weights = torch.randn(3, 8, dtype=BF16), torch.rand(3, dtype=BF16, requires_grad=True)
    swiglu(products, weights).sum().backward()
    assert weights.grad.dtype == BF16 and products.grad is None
    exactly = swiglu(products.double(), weights.detach().double())
    assert exactly.dtype == torch.float64


def test_threads_change_nothing():
    threads = torch.get_num_threads()
    products, weights = torch.randn(65, 130), torch.rand(65)
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(swiglu(products, weights))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "products, weights, message",
    [
        (torch.ones(3, 5), None, "products has 5 columns, expected a gate and as many behind it"),
        (torch.ones(3, 4, dtype=torch.int64), None, "products has dtype int64"),
        (torch.ones(3, 4), torch.ones(2), r"weights has shape \[2\], expected \[3\]"),
        (torch.ones(3, 4), torch.ones(3, dtype=torch.int64), "weights has dtype int64"),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(products, weights, message):
    with pytest.raises(ValueError, match=f"swiglu: {message}"):
        swiglu(products, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("shape, width", [((4099,), 768), ((300, 1), 12288), ((7,), 33)])
def test_on_a_gpu(shape, width, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare(shape, width, dtype, device="cuda")
    compare(shape, width, dtype, has_weights=False, device="cuda")
