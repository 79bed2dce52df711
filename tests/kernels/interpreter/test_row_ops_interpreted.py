"""The Triton kernels of rms_norm and swiglu, with programs so few and tiles so small that one takes several blocks."""

import pytest
import torch
from row_op_cases import compare_norm, compare_rotated_norm, compare_swiglu

from marsrl.kernels.rms_norm import triton_impl as norm
from marsrl.kernels.swiglu import triton_impl as gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, width", [((19,), 16), ((5, 1), 3), ((1,), 21)])
def test_they_are_as_exact_as_plain_pytorch(shape, width, dtype, monkeypatch):
    for module, name, value in (
        (norm, "ELEMENTS", 32),
        (norm, "PROGRAMS", 2),
        (gate, "ELEMENTS", 32),
        (gate, "WIDEST", 8),
    ):
        monkeypatch.setattr(module, name, value)
    compare_norm(shape, width, dtype)
    compare_norm(shape, width, dtype, step=3, is_zero_centred=True)
    compare_swiglu(shape, width, dtype)
    compare_swiglu(shape, width, dtype, has_weights=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, width", [((7, 1, 3), 16), ((5,), 6)])
def test_a_rotated_norm_is_as_exact_as_plain_pytorch(shape, width, dtype, monkeypatch):
    monkeypatch.setattr(norm, "ELEMENTS", 32)
    monkeypatch.setattr(norm, "PROGRAMS", 2)
    compare_rotated_norm(shape, width, dtype)
    compare_rotated_norm(shape, width, dtype, step=3)
