"""A kernel that is bad for an absent GPU is noticed."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import assert_compiled_well, compiled_launches


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def copy_rows(x, out, stride, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + column * 2, mask=column < width)
    tl.store(out + (tl.program_id(0) * BLOCK + column) % BLOCK, values, mask=column < width)


def compiled(target, kernel, *tensors, **words):
    with compiled_launches(target) as reports:
        kernel[(1,)](
            *(torch.empty(*each, device="meta") if isinstance(each, tuple) else each for each in tensors), **words
        )
    return reports[0]


def products(target, size, **words):
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device="meta") for _ in range(2))
    return compiled(target, multiply, a, b, (size, size), SIZE=size, **words)


def test_spills_and_too_much_shared_memory_are_noticed():
    report = products(80, 32, num_warps=1, maxnreg=32)
    with pytest.raises(AssertionError, match="spills [0-9]+ bytes"):
        assert_compiled_well(report, dots=True)
    assert_compiled_well(report, dots=True, spill_allowance_bytes=report.spill_bytes)
    with pytest.raises(AssertionError, match="shared memory"):
        assert_compiled_well(replace(report, shared_bytes=164 * 1024, spill_bytes=0), dots=True)


def test_a_row_times_a_distance_in_32_bits_is_noticed():
    for wide in (True, False):
        report = compiled(80, copy_rows, (128, 100), (128,), 100, 99, WIDE=wide, BLOCK=128)
        assert report.narrow_products == (() if wide else (("row", "stride"),))
    with pytest.raises(AssertionError, match="copy_rows multiplies in 32 bits"):
        assert_compiled_well(report, dots=False)
