"""The Triton kernels of packing, group_advantage and mpt_gate compile for GPUs that are not here."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.group_advantage.triton_impl import group_advantage_triton
from marsrl.kernels.mpt_gate.triton_impl import sequence_sums_triton
from marsrl.kernels.packing import triton_impl as packing

META = torch.device("meta")
T, S = 70_000, 33


def ints(*shape):
    return torch.empty(shape, dtype=torch.int64, device=META)


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_moved_and_ranked_without_spills(target):
    rows = torch.empty(T, 2048, dtype=torch.bfloat16, device=META)
    narrow = torch.empty(S, 4096, 3, dtype=torch.uint8, device=META)
    with compiled_launches(target) as reports:
        packing.pack_rows(narrow, ints(S + 1), T)
        packing.unpack_rows(rows, ints(S + 1), 4096, 0.0)
        packing.gather_rows(rows, ints(5000))
        packing.scatter_rows(rows[:5000], ints(5000), T, 1.0)
        packing.kept_ids(torch.empty(T, dtype=torch.bool, device=META), 5000)
    assert len(reports) == 6
    for report in reports:
        assert_compiled_well(report, dots=False)


@pytest.mark.parametrize("target", TARGETS)
def test_segments_are_summed_without_spills(target):
    with compiled_launches(target) as reports:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            entropy = torch.empty(T, dtype=dtype, device=META)
            sequence_sums_triton(entropy, torch.empty(T, dtype=torch.bool, device=META), ints(S + 1).int())
        group_advantage_triton(torch.empty(720, device=META), ints(720), ints(720), True, False, 1e-6)
    assert [report.kernel for report in reports[3:]] == ["_set_statistics", "_set_statistics", "_advantages"]
    for report in reports:
        assert_compiled_well(report, dots=False)
