"""rms_norm: csrc/cpu and the reference against autograd in float64."""

import pytest
import torch
from rms_norm_cases import EPS, compare, eager

from marsrl.kernels import rms_norm

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("shape, width", [((5,), 7), ((1,), 1), ((70,), 96), ((3, 1), 1030), ((33, 1, 2), 32)])
def test_it_is_as_exact_as_plain_pytorch(shape, width, implementation, dtype, monkeypatch):
    if (implementation, dtype) == ("cpu", torch.float16):
        implementation = "reference"  # csrc/cpu has no float16
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    compare(shape, width, dtype)
    compare(shape, width, dtype, step=3, is_zero_centred=True, scale=30.0)


def test_the_gradient_of_the_weight_is_as_exact_over_many_rows():
    compare((5000,), 16, FP32)
    compare((5000,), 16, BF16)


def test_heads_of_a_projection_are_read_where_they_are():
    projected = torch.randn(6, 4, 3, 8)  # queries, keys and values of four groups
    keys = projected[:, :, 1]
    at, (out, norm) = keys.data_ptr(), _saved(keys)
    assert out.is_contiguous() and [each.data_ptr() for each in norm if each.shape == (24, 8)] == [at]


def _saved(x):
    """The output of rms_norm, and what it keeps for its backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = rms_norm(x.detach().requires_grad_(), torch.ones(x.shape[-1]), eps=EPS)
    return out, kept


def test_it_keeps_its_input_and_a_number_a_row():
    x = torch.randn(6, 8, dtype=BF16)
    _, kept = _saved(x)
    assert sorted((tuple(each.shape), each.dtype) for each in kept if each.ndim < 2) == [((6,), FP32), ((8,), FP32)]
    assert [each.data_ptr() for each in kept if each.ndim == 2] == [x.data_ptr()]


def test_rows_of_zeros_and_of_large_numbers_are_finite():
    x = torch.tensor([[0.0, 0.0], [1e18, -1e18], [1e-20, 1e-20]], requires_grad=True)
    out = rms_norm(x, torch.ones(2), eps=EPS)
    torch.testing.assert_close(out, eager(x.double(), torch.ones(2).double(), eps=EPS).float())
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_a_nan_stays_in_its_row_and_reaches_the_weight():
    x, weight = torch.randn(4, 10), torch.ones(10, requires_grad=True)
    x[2, 3] = torch.nan
    out = rms_norm(x.requires_grad_(), weight, eps=EPS)
    out.sum().backward()
    assert out.isnan().any(1).tolist() == x.grad.isnan().any(1).tolist() == [False, False, True, False]
    assert weight.grad.isnan().all()


def test_no_rows_and_columns_that_do_not_lie_side_by_side():
    empty, weight = torch.randn(0, 6, requires_grad=True), torch.ones(6, requires_grad=True)
    rms_norm(empty, weight, eps=EPS).sum().backward()
    assert empty.grad.shape == (0, 6) and weight.grad.eq(0).all()
    strided, half = torch.randn(6, 5).t().requires_grad_(), torch.rand(12)[::2]
    out = rms_norm(strided, half, eps=EPS)
    torch.testing.assert_close(out, eager(strided, half, eps=EPS))
    out.sum().backward()  # an expanded gradient
    assert strided.grad.shape == (5, 6)


def test_the_weight_may_have_another_dtype_and_has_a_gradient_of_it():
    x, weight = torch.randn(3, 8, dtype=BF16), torch.rand(8, requires_grad=True)
    out = rms_norm(x, weight, eps=EPS)
    out.sum().backward()
    assert (out.dtype, weight.grad.dtype) == (BF16, FP32) and x.grad is None
    assert rms_norm(x.double(), weight.detach().double(), eps=EPS).dtype == torch.float64


def test_threads_change_nothing():
    threads = torch.get_num_threads()
    x, grad = torch.randn(100, 130), torch.randn(100, 130)
    try:
        found = []
        for count in (1, 2):
            torch.set_num_threads(count)
            weight = torch.rand(130, generator=torch.Generator().manual_seed(0)).requires_grad_()
            out = rms_norm(x, weight, eps=EPS)
            out.backward(grad)
            found.append(torch.cat((out.detach(), weight.grad[None])))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "x, weight, message",
    [
        (torch.ones(3, 4, dtype=torch.int64), torch.ones(4), "x has dtype int64"),
        (torch.ones(3, 4), torch.ones(3), r"weight has shape \[3\], expected \[4\]"),
        (torch.ones(3, 4), torch.ones(4, dtype=torch.int64), "weight has dtype int64"),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(x, weight, message):
    with pytest.raises(ValueError, match=f"rms_norm: {message}"):
        rms_norm(x, weight, eps=EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("shape, width", [((4099,), 2048), ((300, 1, 7), 128), ((7,), 33), ((1300,), 5120)])
def test_on_a_gpu(shape, width, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare(shape, width, dtype, device="cuda")
    compare(shape, width, dtype, step=3, is_zero_centred=True, device="cuda")
