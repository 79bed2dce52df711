"""swiglu's Triton kernels, with tiles so small that a row needs several."""

import pytest
import torch
from swiglu_cases import compare

from marsrl.kernels import swiglu
from marsrl.kernels.swiglu import triton_impl


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(triton_impl, "ELEMENTS", 32)
    monkeypatch.setattr(triton_impl, "WIDEST", 8)
    monkeypatch.setenv("MARSRL_KERNELS", "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, width", [((9,), 16), ((5, 1), 3), ((1,), 21)])
def test_it_is_as_exact_as_plain_pytorch(shape, width, dtype):
    compare(shape, width, dtype)
    compare(shape, width, dtype, has_weights=False)


def test_no_rows():
    products, weights = torch.randn(0, 8, requires_grad=True), torch.randn(0, requires_grad=True)
    swiglu(products, weights).sum().backward()
    assert products.grad.shape == (0, 8) and weights.grad.shape == (0,)
