"""grouped_linear's Triton kernels, with tiles so small that a few rows need several."""

import pytest
import torch
from grouped_linear_cases import compare
from test_grouped_linear import test_each_expert_sees_its_own_rows, test_no_rows_and_no_expert  # noqa: F401

from marsrl.kernels.grouped_linear import triton_impl


@pytest.fixture
def implementation(monkeypatch):
    tiles = {"BLOCK_M": 4, "BLOCK_N": 8, "BLOCK_K": 8, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(triton_impl, "plan_tiles", lambda dtype: tiles)


def test_whole_tiles_of_columns(implementation):
    compare([5, 0, 3], 8, 16, torch.bfloat16, given=[5, 0, 3])
