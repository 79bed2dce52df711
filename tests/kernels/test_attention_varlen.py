"""attention_varlen against a masked softmax per segment; again in interpreter/test_ops.py."""

from functools import partial

import pytest
import torch
from attention_cases import (
    SCALES,
    check_a_nan_stays_in_its_sequence,
    check_scale,
    check_without_queries,
    choice,
    compare,
)
from every_op import IS_INTERPRETED

from marsrl.kernels import attention_varlen

# one segment; equal ones (no padding); one bucket with padding; three buckets with empty segments
LENGTHS = [[7], [5, 5, 5], [9, 5, 7], [40, 0, 3, 17, 1, 18, 0, 2]]
DTYPES = [torch.float32, torch.bfloat16]
if (
    IS_INTERPRETED
):  # several tiles of queries and keys, an empty sequence, one shorter than a tile; one ends at a tile's end
    LENGTHS, DTYPES = [[17], [11, 0, 3, 8]], [*DTYPES, torch.float16]


@pytest.fixture(params=["cpu", "reference"])
def implementation(request, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_self_attention(lengths, dtype, implementation):
    compare(lengths, dtype=dtype, head_size=16)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_head_groupings_and_scale(heads, implementation):
    compare([6, 3], heads=heads, head_size=16, scale=0.7)


@pytest.mark.parametrize("scale", SCALES)
def test_any_finite_scale_is_served(scale, implementation):
    check_scale(scale)


def test_every_key_is_seen_without_causal(implementation):
    compare([6, 0, 3], causal=False, head_size=16)
    compare([3, 0, 9], [5, 1, 10], causal=False, heads=(2, 1), head_size=16)


def test_queries_at_the_end_of_longer_keys_see_the_prefix(implementation):
    compare([3, 1, 0, 4], [5, 13, 2, 4], head_size=16)


@pytest.mark.parametrize("check", [check_without_queries, check_a_nan_stays_in_its_sequence])
def test_no_tokens_and_a_nan(check, implementation):
    check()


REALISTIC = [1900, 1, 0, 640, 77, 128]  # a tile, less, more, none


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "torch", "flash4", "flash3", "flash2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 128])
def test_on_a_gpu(implementation, dtype, head_size, monkeypatch):
    repeats = implementation != "torch"
    reason = choice("cuda", dtype, head_size, deterministic=repeats).reasons.get(implementation, "")
    if reason and "is preferred" not in reason:
        pytest.skip(reason)
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    case = {
        "dtype": dtype,
        "head_size": head_size,
        "device": "cuda",
        "attention": partial(attention_varlen, deterministic=repeats),
        "repeats": repeats,
    }
    compare(REALISTIC, heads=(16, 8), **case)
    compare([900, 3, 60], [1000, 40, 60], heads=(4, 1), **case)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [16, 32, 256])
def test_other_head_sizes_on_a_gpu(head_size, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare([300, 0, 41], dtype=torch.bfloat16, heads=(4, 2), head_size=head_size, device="cuda")
    compare([300, 0, 41], causal=False, heads=(4, 2), head_size=head_size, device="cuda")
