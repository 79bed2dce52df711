"""attention_varlen's Triton kernels: tiles so small that a few tokens need several of them."""

import pytest
import torch
from attention_cases import compare
from test_attention_varlen import (  # noqa: F401
    test_any_finite_scale_is_served,
    test_causal_self_attention,
    test_every_key_is_seen_without_causal,
    test_head_groupings_and_scale,
    test_no_tokens_and_a_nan,
    test_queries_at_the_end_of_longer_keys_see_the_prefix,
)

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen import triton_impl
from marsrl.kernels.attention_varlen.triton_impl import TilePlan, Tiles


@pytest.fixture
def implementation(monkeypatch):
    """Forward 8 x 4, gradients 8 x 8 and 4 x 8: neither side divides the other everywhere."""
    plan = TilePlan(Tiles(8, 4, 4, 1), Tiles(8, 8, 4, 1), Tiles(4, 8, 4, 1))
    monkeypatch.setattr(triton_impl, "plan_tiles", lambda head_size, dtype: plan)


def test_the_tiles_of_a_gpu():
    compare([19, 5], dtype=torch.bfloat16, heads=(2, 1), head_size=64)


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
