"""The kernels of the ops beside the head compile for A100 and H100: on tensor cores, without spills, 128 bits at once."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.attention_decode.triton_impl import attention_decode_triton
from marsrl.kernels.attention_varlen.triton_impl import TritonAttention
from marsrl.kernels.grouped_linear.triton_impl import TritonGroupedLinear, plan_tiles
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.moe_permute.triton_impl import triton_permute, triton_unpermute
from marsrl.kernels.rms_norm.triton_impl import TritonRmsNorm
from marsrl.kernels.sequence_sums.triton_impl import sequence_sums_triton
from marsrl.kernels.swiglu.triton_impl import TritonSwiglu

T, S, BF16 = 70_000, 33, torch.bfloat16


def of(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return of(*shape, dtype=torch.int64)


def compiled(target, names, launch):
    """The reports of what launch() launches, which are these kernels."""
    with compiled_launches(target) as reports:
        launch()
    assert [report.kernel for report in reports] == names
    return reports


def both_ways(kernels, args, needs):
    """Forward and backward of an op whose leading arguments are the tensors."""
    found = kernels.forward(*args)
    kernels.backward(args, found, found[:1], needs)


@pytest.mark.parametrize("target", TARGETS)
def test_segments_are_summed(target):
    def launch():
        for dtype in (torch.float32, BF16, torch.float64):
            sequence_sums_triton(of(T, dtype=dtype), of(T, dtype=torch.bool), ints(S + 1).int())
        sequence_sums_triton(of(T, dtype=torch.float32), None, ints(S + 1))

    for report in compiled(target, ["_sequence_sums"] * 4, launch):
        assert_compiled_well(report, dots=False)


# an expert's; a dense layer has no weights
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [768, 12288])
def test_swiglu(width, target):
    args = of(T, 2 * width), of(T, dtype=torch.float32) if width == 768 else None
    names = ["forward_rows", "gradient_rows"]
    for report in compiled(target, names, lambda: both_ways(TritonSwiglu(), args, (True, True))):
        assert_compiled_well(report, dots=False)
        assert report.num_wide_loads and report.num_wide_stores, report


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width, is_rotated", [(128, False), (2048, False), (5120, False), (128, True), (64, True)])
def test_rms_norm(width, is_rotated, target):
    rotation = of(T // 4, width, dtype=torch.float32) if is_rotated else None
    args = of(T, 3 * width)[:, :width], of(width), rotation, 1e-6, 0.0  # keys of a fused projection

    def launch():
        out, scales = TritonRmsNorm().forward(*args)
        TritonRmsNorm().backward(args, (scales,), (out,), (True, True, False))

    for report in compiled(target, ["forward_rows", "gradient_rows"], launch):
        assert_compiled_well(report, dots=False)
        assert report.num_wide_loads and report.num_wide_stores, report


@pytest.mark.parametrize("target", TARGETS)
def test_grouped_linear(target):
    args = of(T, 2048), of(128, 768, 2048), ints(128), None
    names = ["rows_times_matrices", "rows_times_matrices", "matrix_gradients"]
    for report in compiled(target, names, lambda: both_ways(TritonGroupedLinear(), args, (True, True, False))):
        assert_compiled_well(report, dots=True)


@pytest.mark.parametrize("target", TARGETS)
def test_grouped_linear_with_main_grad(target):
    """A tile of float32 is read and written, too, and on Hopper two programs fit the 65,536 registers of a multiprocessor."""
    weights = of(128, 1536, 2048)
    args = of(T, 2048), weights, ints(128), MainGrad(weights, of(*weights.shape, dtype=torch.float32))
    names = ["rows_times_matrices", "matrix_gradients"] * 2

    def launch():
        for buffer in (None, args[-1]):
            TritonGroupedLinear().backward((*args[:-1], buffer), (), (of(T, 1536),), (True, True, False))

    _, without, _, adding = compiled(target, names, launch)
    assert_compiled_well(adding, dots=True)
    assert adding.num_wide_loads >= without.num_wide_loads + 16 and adding.num_wide_stores == 16, adding
    assert target < 90 or adding.registers * 32 * plan_tiles(torch.bfloat16)["num_warps"] * 2 <= 65_536


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [2048, 5120])
def test_moe_permute(width, target):
    order = ints(8 * T), ints(8 * T), ints(T + 1)

    def launch():
        args = of(T, width), of(T, 128, dtype=torch.float32), *order, ints(8 * T)
        triton_permute().backward(args, (), triton_permute().forward(*args), (True, False))
        both_ways(triton_unpermute(), (of(8 * T, width), *order), (True,))

    for report in compiled(target, ["copy_tokens", "sum_rows", "sum_rows", "copy_tokens"], launch):
        assert_compiled_well(report, dots=False)
        assert report.num_wide_loads and report.num_wide_stores, report


@pytest.mark.parametrize("target", TARGETS)
def test_packed_attention(target):
    keys, bounds = of(T, 8, 128), ints(S).int()
    args = of(T, 16, 128), keys, keys, bounds, bounds, 0.1, True, None, False
    names = ["attention_forward", "attention_query_gradient", "attention_key_gradients"]
    for report in compiled(target, names, lambda: both_ways(TritonAttention(), args, (True,) * 3 + (False,) * 2)):
        # A few addresses wait in local memory while the sums fill 255 registers; smaller tiles would read more.
        assert_compiled_well(report, dots=True, spill_allowance_bytes=96)


@pytest.mark.parametrize("target", TARGETS)
def test_decoding(target):
    cache = of(64, 8, 8192, 128).transpose(1, 2)
    split, total = compiled(
        target,
        ["decode_split", "decode_sum"],
        lambda: attention_decode_triton(of(64, 16, 128), cache, cache, ints(64), 0.1),
    )
    # Two query heads a key head fill a tile of 16 rows: too few for a warpgroup.
    assert_compiled_well(split, dots=True, warpgroup_dots=False)
    assert_compiled_well(total, dots=False)
