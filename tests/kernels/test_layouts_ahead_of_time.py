"""The Triton kernels of packing, group_advantage, sequence_sums, swiglu and rms_norm compile for GPUs that are not here."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.group_advantage.triton_impl import group_advantage_triton
from marsrl.kernels.packing import triton_impl as packing
from marsrl.kernels.rms_norm.triton_impl import TritonRmsNorm
from marsrl.kernels.sequence_sums.triton_impl import sequence_sums_triton
from marsrl.kernels.swiglu.triton_impl import TritonSwiglu

META = torch.device("meta")
T, S = 70_000, 33


def ints(*shape):
    return torch.empty(shape, dtype=torch.int64, device=META)


def flags():
    return torch.empty(T, dtype=torch.bool, device=META)


@pytest.mark.parametrize("target", TARGETS)
def test_sequences_are_packed_without_spills(target):
    logprobs = torch.empty(T, device=META)
    with compiled_launches(target) as reports:
        packing.pack_triton(ints(T).int(), flags(), ints(S + 1).int(), T + 5, logprobs, logprobs)
        packing.pack_triton(ints(T), flags(), ints(S + 1).int(), T, None, None)
    assert [report.kernel for report in reports] == ["_pack", "_pack"]
    for report in reports:
        assert_compiled_well(report, dots=False)


@pytest.mark.parametrize("target", TARGETS)
def test_segments_are_summed_without_spills(target):
    with compiled_launches(target) as reports:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            entropy = torch.empty(T, dtype=dtype, device=META)
            sequence_sums_triton(entropy, flags(), ints(S + 1).int())
        sequence_sums_triton(torch.empty(T, device=META), None, ints(S + 1))
        group_advantage_triton(torch.empty(720, device=META), ints(720), ints(720), True, False, 1e-6)
    assert [report.kernel for report in reports[4:]] == ["_set_statistics", "_set_statistics", "_advantages"]
    for report in reports:
        assert_compiled_well(report, dots=False)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [768, 12288])
def test_swiglu_reads_and_writes_128_bits_at_once_without_spills(width, target):
    products = torch.empty(T, 2 * width, dtype=torch.bfloat16, device=META)
    weights = torch.empty(T, device=META) if width == 768 else None  # an expert's; a dense layer has none
    with compiled_launches(target) as reports:
        out = TritonSwiglu().forward(products, weights)
        TritonSwiglu().gradients(products, weights, out)
    assert [report.kernel for report in reports] == ["forward_rows", "gradient_rows"]
    for report in reports:
        assert_compiled_well(report, dots=False)
        assert report.num_wide_loads and report.num_wide_stores, report


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [128, 2048, 5120])
def test_rms_norm_reads_and_writes_128_bits_at_once_without_spills(width, target):
    rows = torch.empty(T, 3 * width, dtype=torch.bfloat16, device=META)[:, :width]  # keys of a fused projection
    weight = torch.empty(width, dtype=torch.bfloat16, device=META)
    with compiled_launches(target) as reports:
        out, scales = TritonRmsNorm().forward(rows, weight, 1e-6, 0.0)
        TritonRmsNorm().gradients(rows, weight, 0.0, scales, out)
    assert [report.kernel for report in reports] == ["forward_rows", "gradient_rows"]
    for report in reports:
        assert_compiled_well(report, dots=False)
        assert report.num_wide_loads and report.num_wide_stores, report
