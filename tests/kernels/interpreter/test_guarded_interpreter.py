"""The interpreter that judges our kernels is right in bfloat16, and loud where it cannot be."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def double(x, n, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    if FLOAT:
        values = values.to(tl.float32)
    tl.store(x + at, (values + values).to(x.dtype.element_ty), mask=at < n)


@triton.jit
def third(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, (tl.load(x + at) / 3).to(out.dtype.element_ty))


def test_a_bfloat16_dot():
    a, b = torch.randn(2, 16, 16, dtype=torch.bfloat16).unbind()
    out = torch.empty(16, 16)
    multiply[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_a_cast_to_bfloat16_rounds_to_the_nearest():
    x = torch.randn(4096)
    out = torch.empty(4096, dtype=torch.bfloat16)
    third[(1,)](x, out, BLOCK=4096)
    torch.testing.assert_close(out, (x / 3).bfloat16(), rtol=0, atol=0)


def test_bfloat16_arithmetic_is_refused():
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast what is loaded to float32"):
        double[(1,)](x, 8, FLOAT=False, BLOCK=8)
    double[(1,)](x, 8, FLOAT=True, BLOCK=8)
    assert (x == 2).all()


def test_an_access_outside_of_the_tensors_is_refused():
    x = torch.ones(12)
    double[(2,)](x, 12, FLOAT=True, BLOCK=8)
    assert (x == 2).all()
    with pytest.raises(Exception, match="load outside of the kernel's tensors: 4 of 8 elements"):
        double[(2,)](x, 16, FLOAT=True, BLOCK=8)


def test_fresh_memory_is_poisoned():
    assert torch.empty(4).isnan().all()
