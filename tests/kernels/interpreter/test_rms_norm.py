"""rms_norm's Triton kernels, with so few programs that one takes several blocks of rows."""

import pytest
import torch
from rms_norm_cases import EPS, compare

from marsrl.kernels import rms_norm
from marsrl.kernels.rms_norm import triton_impl


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(triton_impl, "ELEMENTS", 32)
    monkeypatch.setattr(triton_impl, "PROGRAMS", 2)
    monkeypatch.setenv("MARSRL_KERNELS", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, width", [((19,), 16), ((5, 1), 3), ((1,), 21)])
def test_it_is_as_exact_as_plain_pytorch(shape, width, dtype):
    compare(shape, width, dtype)
    compare(shape, width, dtype, step=3, is_zero_centred=True)


def test_no_rows():
    x, weight = torch.randn(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    rms_norm(x, weight, eps=EPS).sum().backward()
    assert x.grad.shape == (0, 8) and weight.grad.eq(0).all()
