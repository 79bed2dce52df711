"""Kernels compile for absent GPUs, and a bad one is noticed."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import TARGETS, assert_compiled_well, compile_kernel, compiled_launches


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@pytest.mark.parametrize("target", TARGETS)
def test_a_dot_uses_the_tensor_cores_of_the_target(target):
    report = compile_kernel(multiply, target, {"a": "*bf16", "b": "*bf16", "out": "*fp32"}, {"SIZE": 64})
    assert_compiled_well(report, dots=True)
    assert (report.num_hgmma > 0) == (target == 90) and 0 < report.registers <= 255


def test_a_launch_compiles_with_what_it_was_given():
    with compiled_launches(90) as reports:
        double[(70_000,)](torch.empty(70_000 * 128, device="meta"), 70_000 * 128, BLOCK=128, num_warps=2)
    assert_compiled_well(reports[0], dots=False)
    assert reports[0].kernel == "double" and reports[0].num_warps == 2
    with pytest.raises(AssertionError, match="tensor cores"):
        assert_compiled_well(reports[0], dots=True)


def test_spills_and_too_much_shared_memory_are_noticed():
    types = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
    report = compile_kernel(multiply, 80, types, {"SIZE": 32}, num_warps=1, max_registers=32)
    with pytest.raises(AssertionError, match="spills [0-9]+ bytes"):
        assert_compiled_well(report, dots=True)
    assert_compiled_well(report, dots=True, spill_allowance_bytes=report.spill_bytes)
    with pytest.raises(AssertionError, match="shared memory"):
        assert_compiled_well(replace(report, shared_bytes=164 * 1024, spill_bytes=0), dots=True)
