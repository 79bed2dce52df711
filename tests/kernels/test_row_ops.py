"""rms_norm and swiglu: csrc/cpu, the reference and Triton on a GPU against autograd in float64."""

import pytest
import torch
from row_op_cases import EPS, compare_norm, compare_rotated_norm, compare_swiglu, eager_norm, eager_swiglu

from marsrl.kernels import rms_norm, swiglu

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
TIERS = [
    (tier, dtype) for tier in ("cpu", "reference") for dtype in (FP32, BF16, FP16) if (tier, dtype) != ("cpu", FP16)
]


@pytest.mark.parametrize("implementation, dtype", TIERS)
@pytest.mark.parametrize(
    "shape, width", [((5,), 7), ((1,), 1), ((70,), 96), ((3, 1), 1030), ((33, 1, 2), 32), ((5000,), 16)]
)
def test_they_are_as_exact_as_plain_pytorch(shape, width, implementation, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare_norm(shape, width, dtype)
    compare_norm(shape, width, dtype, step=3, is_zero_centred=True, scale=30.0)
    for has_weights in (True, False):
        compare_swiglu(shape, width, dtype, has_weights=has_weights)
        compare_swiglu(shape, width, dtype, has_weights=has_weights, scale=60.0)  # gates beyond e^88


@pytest.mark.parametrize("implementation, dtype", TIERS)
@pytest.mark.parametrize("shape, width", [((5, 1, 3), 16), ((1, 2), 2), ((70,), 96), ((33, 2), 10)])
def test_a_rotated_norm_is_as_exact_as_plain_pytorch(shape, width, implementation, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare_rotated_norm(shape, width, dtype)
    compare_rotated_norm(shape, width, dtype, step=3)


def test_a_rotation_keeps_lengths_and_angles_between_positions():
    x, weight = torch.randn(1, 2, 8).expand(6, 2, 8), torch.ones(8)
    angles = torch.arange(6)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])
    out = rms_norm(x, weight, eps=EPS, rotation=torch.cat((angles.cos(), angles.sin()), -1))
    torch.testing.assert_close(out[0], rms_norm(x[0], weight, eps=EPS))  # position 0 is not rotated
    products = (out[:, 0] * out[:, 1].roll(-1, 0)).sum(-1)[:-1]  # of neighbours, wherever they are
    torch.testing.assert_close(products, products[:1].expand(5), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape, width", [((4099,), 768), ((300, 1, 7), 128), ((7,), 33), ((1300,), 5120)])
def test_on_a_gpu(shape, width, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare_norm(shape, width, dtype, device="cuda")
    compare_norm(shape, width, dtype, step=3, is_zero_centred=True, device="cuda")
    if width % 2 == 0:
        compare_rotated_norm(shape, width, dtype, device="cuda")
        compare_rotated_norm(shape, width, dtype, step=3, device="cuda")
    compare_swiglu(shape, width, dtype, device="cuda")
    compare_swiglu(shape, width, dtype, has_weights=False, device="cuda")


def test_rows_of_zeros_and_of_large_numbers_are_finite():
    x = torch.tensor([[0.0, 0.0], [1e18, -1e18], [1e-20, 1e-20]], requires_grad=True)
    out = rms_norm(x, torch.ones(2), eps=EPS)
    torch.testing.assert_close(out, eager_norm(x.double(), torch.ones(2).double()).float())
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_gates_far_out_are_shut_or_open():
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 200.0, 1e30])
    products = torch.cat((gate, torch.ones(6))).requires_grad_()
    out = swiglu(products[None])[0]
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 200.0, 1e30]), atol=1e-8, rtol=1e-6)
    out.sum().backward()
    torch.testing.assert_close(products.grad[:6], torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0]), atol=1e-8, rtol=1e-6)


def test_a_nan_stays_in_its_row_and_reaches_the_weight_of_a_norm():
    x, weight = torch.randn(4, 10), torch.ones(10, requires_grad=True)
    x[2, 3] = torch.nan
    assert swiglu(x).isnan().any(1).tolist() == [False, False, True, False]
    out = rms_norm(x.requires_grad_(), weight, eps=EPS)
    out.sum().backward()
    assert out.isnan().any(1).tolist() == x.grad.isnan().any(1).tolist() == [False, False, True, False]
    assert weight.grad.isnan().all()


@pytest.mark.parametrize("ours, eager", [(lambda x, w: rms_norm(x, w, eps=EPS), eager_norm), (swiglu, eager_swiglu)])
def test_a_weight_of_another_dtype_has_a_gradient_of_it_and_float64_is_served(ours, eager):
    x, weight = torch.randn(8, 8, dtype=BF16), torch.rand(8, requires_grad=True)
    out = ours(x, weight)
    out.sum().backward()  # an expanded gradient
    assert (out.dtype, weight.grad.dtype) == (BF16, FP32) and x.grad is None
    exactly = ours(x.double(), weight.detach().double())
    torch.testing.assert_close(exactly, eager(x.double(), weight.detach().double()))
