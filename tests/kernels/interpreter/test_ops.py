"""The ops' tests with Triton's kernels, in tiles so small that a few numbers need several."""

import pytest
import torch
from test_attention_decode import (  # noqa: F401
    test_each_row_sees_its_own_keys,
    test_keys_beyond_a_sequences_length_are_ignored,
)
from test_attention_varlen import compare as compare_attention
from test_attention_varlen import (  # noqa: F401
    test_a_nan_stays_in_its_sequence_and_its_gradients,
    test_any_finite_scale_is_served,
    test_causal_self_attention,
    test_heads_keys_and_masks,
    test_no_tokens,
)
from test_grouped_linear import (  # noqa: F401
    by_grouped_mm,
    compare_main_grad,
    test_dw_is_added_to_main_grad,
    test_each_expert_sees_its_own_rows,
    test_no_rows_and_no_expert,
)
from test_grouped_linear import compare as compare_grouped_linear
from test_moe_permute import (  # noqa: F401
    test_each_expert_gets_its_tokens_and_each_token_their_sum,
    test_sums_round_once,
    test_the_backward_keeps_neither_tokens_nor_rows,
    test_the_order_of_rows_there_and_back,
    test_weights_may_differ_from_tokens_in_dtype,
)
from test_row_ops import test_row_ops_are_as_exact_as_plain_pytorch  # noqa: F401

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_decode import triton_impl as decode
from marsrl.kernels.attention_varlen import triton_impl as attention
from marsrl.kernels.grouped_linear import triton_impl as experts
from marsrl.kernels.moe_permute import triton_impl as moves
from marsrl.kernels.rms_norm import triton_impl as norm
from marsrl.kernels.swiglu import triton_impl as gate

# Tiles of packed attention: 8 x 4 forward, 8 x 8 and 4 x 8 for the gradients, so that neither side always divides the other.
ATTENTION = attention.TilePlan(*(attention.Tiles(*each, 4, 1) for each in ((8, 4), (8, 8), (4, 8))))


@pytest.fixture
def implementation(monkeypatch):
    for module, name, value in (
        (decode, "SPLIT", 64),
        (attention, "plan_tiles", lambda head_size, dtype: ATTENTION),
        (
            experts,
            "plan_tiles",
            lambda dtype: {"BLOCK_M": 4, "BLOCK_N": 8, "BLOCK_K": 8, "num_warps": 4, "num_stages": 1},
        ),
        (moves, "WIDEST", 16),
        (norm, "ELEMENTS", 32),
        (norm, "PROGRAMS", 2),
        (gate, "ELEMENTS", 32),
        (gate, "WIDEST", 8),
    ):
        monkeypatch.setattr(module, name, value)
    return "triton"


@pytest.mark.smoke
def test_whole_tiles_of_columns(implementation):
    compare_grouped_linear([5, 0, 3], 8, 16, torch.bfloat16, given=[5, 0, 3])


def test_the_products_of_grouped_mm_and_main_grad_by_triton(implementation):
    compare_main_grad([5, 0, 3], 8, 16, torch.bfloat16, function=by_grouped_mm)


@pytest.mark.smoke
def test_the_tiles_of_a_gpu():
    compare_attention([19, 5], dtype=torch.bfloat16, heads=(2, 1), head_size=64)


@pytest.mark.parametrize(
    "x, reason",
    [
        (torch.randn(5, 2, 16).double(), "q is float64"),
        (torch.randn(5, 2, 24), "head size 24, the kernels support 16, 32, 64, 128 and 256"),
    ],
)
def test_unsupported_attention_is_refused_with_the_reason(x, reason):
    with pytest.raises(RuntimeError, match=reason):
        attention_varlen(x, x, x, torch.tensor([0, 5]))
