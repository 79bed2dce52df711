"""The Triton kernels of moe_permute, with so few columns a program that a few need several."""

import pytest
from test_moe_permute import (  # noqa: F401
    test_each_expert_gets_its_tokens_and_each_token_their_sum,
    test_rows_are_in_the_order_of_experts_and_then_of_tokens,
    test_rows_of_other_ranks_are_sorted_and_go_back,
    test_sums_are_rounded_once,
    test_the_backward_keeps_neither_tokens_nor_rows,
    test_weights_have_a_dtype_of_their_own,
)

from marsrl.kernels.moe_permute import triton_impl


@pytest.fixture
def implementation(monkeypatch):
    monkeypatch.setattr(triton_impl, "WIDEST", 16)
