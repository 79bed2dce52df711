"""attention_decode's Triton kernels, with splits so small that a few keys need several."""

import pytest
from test_attention_decode import (  # noqa: F401
    test_any_finite_scale_is_served,
    test_each_row_sees_its_own_keys,
    test_what_stands_behind_a_length_does_not_count,
)

from marsrl.kernels.attention_decode import triton_impl


@pytest.fixture
def implementation(monkeypatch):
    monkeypatch.setattr(triton_impl, "SPLIT", 64)
    return "triton"
