"""What grouped_linear launches compiles for A100 and H100, on their tensor cores."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.grouped_linear.triton_impl import TritonGroupedLinear


@pytest.mark.parametrize("target", TARGETS)
def test_three_gemms(target):
    x = torch.empty(65_537, 2048, dtype=torch.bfloat16, device="meta")
    weights = torch.empty(128, 768, 2048, dtype=torch.bfloat16, device="meta")
    with compiled_launches(target) as reports:
        counts = torch.empty(128, dtype=torch.int64, device="meta")
        kernels = TritonGroupedLinear()
        outputs = kernels.forward(x, weights, counts)
        kernels.backward((x, weights, counts), (), outputs, (True, True, False))
    assert [report.kernel for report in reports] == ["rows_times_matrices", "rows_times_matrices", "matrix_gradients"]
    for report in reports:
        assert_compiled_well(report, dots=True)
