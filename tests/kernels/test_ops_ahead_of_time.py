"""Kernels of the other ops compile for A100 and H100: on tensor cores, without spills, with 128-bit accesses."""

from functools import partial

import pytest
import torch
from ahead_of_time import ATTENTION, TARGETS, compile_well, floats, ints

from marsrl.kernels.attention_decode.triton_impl import attention_decode_triton
from marsrl.kernels.attention_varlen.triton_impl import TritonAttention
from marsrl.kernels.grouped_linear.triton_impl import TritonGroupedLinear, plan_tiles
from marsrl.kernels.main_grad import MainGrad
from marsrl.kernels.moe_permute.triton_impl import triton_permute, triton_unpermute
from marsrl.kernels.rms_norm.triton_impl import TritonRmsNorm
from marsrl.kernels.sequence_sums.triton_impl import sequence_sums_triton
from marsrl.kernels.swiglu.triton_impl import TritonSwiglu

T, S, BF16, FP32 = 70_000, 33, torch.bfloat16, torch.float32
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("target", TARGETS)]
tensor = partial(floats, dtype=BF16)


def both_ways(kernels, args, needs):
    """Run an op's forward and backward passes.

    args: the op's arguments, tensors first. needs: for each tensor, whether it needs a gradient.
    """
    found = kernels.forward(*args)
    kernels.backward(args, found, found[:1], needs)


def test_segments_are_summed(target):
    with compile_well(target, ["_sequence_sums"] * 4):
        for dtype in (FP32, BF16, torch.float64):
            sequence_sums_triton(tensor(T, dtype=dtype), tensor(T, dtype=torch.bool), ints(S + 1).int())
        sequence_sums_triton(tensor(T, dtype=FP32), None, ints(S + 1))


@pytest.mark.parametrize("width", [768, 12288])  # an expert, with weights; a dense layer, without
def test_swiglu(width, target):
    with compile_well(target, ["forward_rows", "gradient_rows"], is_wide=True):
        both_ways(TritonSwiglu(), (tensor(T, 2 * width), tensor(T, dtype=FP32) if width == 768 else None), (True, True))


@pytest.mark.parametrize("width, is_rotated", [(128, False), (2048, False), (5120, False), (128, True), (64, True)])
def test_rms_norm(width, is_rotated, target):
    rotation = tensor(T // 4, width, dtype=FP32) if is_rotated else None
    args = tensor(T, 3 * width)[:, :width], tensor(width), rotation, 1e-6, 0.0  # x is a view of a fused projection
    with compile_well(target, ["forward_rows", "gradient_rows"], is_wide=True):
        out, scales = TritonRmsNorm().forward(*args)
        TritonRmsNorm().backward(args, (scales,), (out,), (True, True, False))


def test_grouped_linear(target):
    with compile_well(target, ["rows_times_matrices", "rows_times_matrices", "matrix_gradients"]):
        both_ways(
            TritonGroupedLinear(), (tensor(T, 2048), tensor(128, 768, 2048), ints(128), None), (True, True, False)
        )


def test_grouped_linear_with_main_grad(target):
    """With main_grad the kernel also reads and writes a float32 tile. On Hopper, two programs still fit into the 65,536
    registers of a multiprocessor.
    """
    weights = tensor(128, 1536, 2048)
    with compile_well(target, ["rows_times_matrices", "matrix_gradients"] * 2) as reports:
        for buffer in (None, MainGrad(weights, tensor(*weights.shape, dtype=FP32))):
            args = tensor(T, 2048), weights, ints(128), buffer
            TritonGroupedLinear().backward(args, (), (tensor(T, 1536),), (True, True, False))
    _, without, _, adding = reports
    assert adding.num_wide_loads >= without.num_wide_loads + 16 and adding.num_wide_stores == 16, adding
    assert target < 90 or adding.registers * 32 * plan_tiles(torch.bfloat16)["num_warps"] * 2 <= 65_536


@pytest.mark.parametrize("width", [2048, 5120])
def test_moe_permute(width, target):
    order = ints(8 * T), ints(8 * T), ints(T + 1)
    args = tensor(T, width), tensor(T, 128, dtype=FP32), *order, ints(8 * T)
    with compile_well(target, ["copy_tokens", "sum_rows", "sum_rows", "copy_tokens"], is_wide=True):
        triton_permute().backward(args, (), triton_permute().forward(*args), (True, False))
        both_ways(triton_unpermute(), (tensor(8 * T, width), *order), (True,))


def test_packed_attention(target):
    keys, bounds = tensor(T, 8, 128), ints(S).int()
    args = tensor(T, 16, 128), keys, keys, bounds, bounds, 0.1, True, None, False
    with compile_well(target, ATTENTION):
        both_ways(TritonAttention(), args, (True,) * 3 + (False,) * 2)


def test_decoding(target):
    cache = tensor(64, 8, 8192, 128).transpose(1, 2)
    with compile_well(target, ["decode_split", "decode_sum"]):
        attention_decode_triton(tensor(64, 16, 128), cache, cache, ints(64), 0.1)
