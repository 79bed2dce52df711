"""attention_decode's Triton kernels, with splits so small that a few keys need several."""

import pytest
import torch
from decode_cases import compare

from marsrl.kernels import attention_decode
from marsrl.kernels.attention_decode import triton_impl


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_row_sees_its_own_keys(dtype, monkeypatch):
    monkeypatch.setattr(triton_impl, "SPLIT", 64)
    # one key; an end inside of a split, at its end, behind it; three heads a key head
    compare([1, 60, 64, 130], 150, (6, 2), 16, dtype)


@pytest.mark.parametrize("scale", [-0.6, 0.0])
def test_any_finite_scale_is_served(scale):
    compare([1, 13], 16, (2, 1), 16, scale=scale)


def test_a_row_depends_on_nothing_but_itself(monkeypatch):
    monkeypatch.setattr(triton_impl, "SPLIT", 64)
    q, cache = torch.randn(3, 2, 16), torch.randn(3, 200, 1, 16)
    cache[1, 70:] = torch.nan  # behind its length
    lengths = torch.tensor([200, 70, 1])
    output = attention_decode(q, cache, cache, lengths)
    assert torch.equal(output[1:2], attention_decode(q[1:2], cache[1:2, :70], cache[1:2, :70], lengths[1:2]))
