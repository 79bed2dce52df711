"""attention_decode: one query per sequence over a padded cache; also in interpreter/test_ops.py."""

import pytest
import torch
from every_op import IS_INTERPRETED

from marsrl.kernels import attention_decode
from marsrl.kernels.attention_decode.reference import attention_decode_reference
from marsrl.kernels.testing import assert_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16][: 3 if IS_INTERPRETED else 2]
SIZES = (16, 64) if IS_INTERPRETED else (8, 40)  # head sizes: Triton needs powers of 2


def compare(lengths, capacity, heads, head_size, dtype=torch.float32, scale=None, device="cpu"):
    """Compare with the definition. The cache is stored by head and passed as a transposed view, as in the local engine."""
    num_heads, num_key_heads = heads
    q = torch.randn(len(lengths), num_heads, head_size, device=device).to(dtype)
    shape = (len(lengths), num_key_heads, capacity, head_size)
    k, v = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    given = torch.tensor(lengths, device=device)
    output = attention_decode(q, k, v, given, scale=scale)
    exact_scale = head_size**-0.5 if scale is None else scale
    exact, plain = (
        attention_decode_reference(q.to(d), k.to(d), v.to(d), given, exact_scale) for d in (torch.float64, dtype)
    )
    assert_accurate("output", output, exact, plain)
    assert torch.equal(output, attention_decode(q, k, v, given, scale=scale)), "output differs between two runs"
    longest = max(lengths)
    alone = attention_decode(q[:1], k[:1, :longest].contiguous(), v[:1, :longest].contiguous(), given[:1], scale=scale)
    assert_accurate("decoded alone", alone, exact[:1], plain[:1])
    if device == "cuda":
        assert torch.equal(alone, output[:1]), "the other rows or the capacity change a row"


@pytest.fixture(params=["cpu", "torch", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [pytest.param((4, 2), marks=pytest.mark.smoke), (3, 3), (6, 1)])
def test_each_row_sees_its_own_keys(heads, dtype, implementation):
    for scale in (0.6, -0.6, 0.0):
        compare([7, 1, 16, 12], 16, heads, SIZES[0], dtype, scale=scale)
    compare([64, 65, 150, 3], 160, heads, SIZES[1], dtype)  # lengths around a block, or a split, of 64 keys


def test_keys_beyond_a_sequences_length_are_ignored(implementation):
    q, cache = torch.randn(3, 4, 16), torch.randn(3, 200, 2, 16)
    lengths, changed = torch.tensor([200, 70, 1]), cache.clone()
    # The implementations torch and reference multiply padding by 0, so their padding must be finite.
    changed[1, 70:] = 1e4 if implementation in ("torch", "reference") else torch.nan
    assert torch.equal(attention_decode(q, cache, cache, lengths), attention_decode(q, changed, changed, lengths))


def test_float16_is_left_to_pytorch():
    compare([7, 3], 8, (4, 2), 8, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 128])
def test_on_a_gpu(head_size, dtype, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare([3000, 1, 511, 512, 513, 77], 4096, (16, 8), head_size, dtype, device="cuda")
    compare([700, 64], 700, (14, 2), head_size, dtype, device="cuda")  # seven query heads per key head


def test_no_sequences():
    q, cache = torch.zeros(0, 4, 8), torch.zeros(0, 5, 2, 8)
    assert attention_decode(q, cache, cache, torch.zeros(0, dtype=torch.int64)).shape == (0, 4, 8)
