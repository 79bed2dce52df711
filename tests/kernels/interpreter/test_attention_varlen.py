"""attention_varlen's Triton kernels: tiles so small that a few tokens need several of them."""

import pytest
import torch
from attention_cases import SCALES, check_scale, check_without_queries, compare

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen import triton_impl
from marsrl.kernels.attention_varlen.triton_impl import TilePlan, Tiles


@pytest.fixture
def small_tiles(monkeypatch):
    """Forward 8 x 4, gradients 8 x 8 and 4 x 8: neither side divides the other everywhere."""
    plan = TilePlan(Tiles(8, 4, 4, 1), Tiles(8, 8, 4, 1), Tiles(4, 8, 4, 1))
    monkeypatch.setattr(triton_impl, "plan_tiles", lambda head_size, dtype: plan)


# several tiles of queries and keys, an empty sequence, one shorter than a tile; the last ends at a tile's end
@pytest.mark.parametrize("lengths", [[17], [11, 0, 3, 8]])
def test_causal_self_attention(lengths, small_tiles):
    compare(lengths, heads=(2, 1), head_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, small_tiles):
    compare([9, 4], dtype=dtype, heads=(2, 1), head_size=16, scale=0.7)


@pytest.mark.parametrize("scale", SCALES)
def test_any_finite_scale_is_served(scale, small_tiles):
    check_scale(scale)


def test_every_head_has_its_own_keys(small_tiles):
    compare([9], heads=(2, 2), head_size=16)


def test_queries_at_the_end_of_longer_keys_see_the_prefix(small_tiles):
    compare([3, 1, 0, 4], [5, 13, 2, 4], heads=(2, 1), head_size=16)


def test_every_key_is_seen_without_causal(small_tiles):
    compare([3, 0, 9], [5, 1, 10], causal=False, heads=(2, 1), head_size=16)


def test_the_tiles_of_a_gpu(monkeypatch):
    compare([19, 5], dtype=torch.bfloat16, heads=(2, 1), head_size=64)


def test_a_nan_in_one_sequence_stays_there(small_tiles):
    q, k, v = torch.randn(3, 9, 1, 16).unbind()
    for x in (q, k, v):
        x[5:] = torch.nan
        x.requires_grad_()
    output = attention_varlen(q, k, v, torch.tensor([0, 5, 9]))
    output.backward(torch.ones_like(output))
    assert all(x[:5].isfinite().all() for x in (output, q.grad, k.grad, v.grad))


def test_no_tokens():
    check_without_queries()


@pytest.mark.parametrize(
    "x, reason",
    [
        (torch.randn(5, 2, 16).double(), "q is float64"),
        (torch.randn(5, 2, 24), "head size 24, the kernels take 16, 32, 64, 128 and 256"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(x, reason):
    with pytest.raises(RuntimeError, match=reason):
        attention_varlen(x, x, x, torch.tensor([0, 5]))
