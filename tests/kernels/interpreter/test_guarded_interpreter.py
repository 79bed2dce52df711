"""The guarded interpreter raises where Triton's would be silently wrong."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.smoke


@triton.jit
def double(x, n, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n)
    if FLOAT:
        values = values.to(tl.float32)
    tl.store(x + at, (values + values).to(x.dtype.element_ty), mask=at < n)


def test_bfloat16_arithmetic_is_refused():
    x = torch.ones(8, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast loaded values to float32"):
        double[(1,)](x, 8, FLOAT=False, BLOCK=8)
    double[(1,)](x, 8, FLOAT=True, BLOCK=8)
    assert (x == 2).all()


def test_an_access_outside_of_the_tensors_is_refused():
    x = torch.ones(12)
    double[(2,)](x, 12, FLOAT=True, BLOCK=8)
    assert (x == 2).all()
    with pytest.raises(Exception, match="load outside of the kernel's tensors: 4 of 8 elements"):
        double[(2,)](x, 16, FLOAT=True, BLOCK=8)
