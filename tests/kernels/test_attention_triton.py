"""What attention_varlen and attention_decode launch compiles for A100 and H100, on their tensor cores."""

import pytest
import torch
from ahead_of_time import TARGETS, assert_compiled_well, compiled_launches

from marsrl.kernels.attention_decode.triton_impl import attention_decode_triton
from marsrl.kernels.attention_varlen.triton_impl import TritonAttention


@pytest.mark.parametrize("target", TARGETS)
def test_packed_attention(target):
    q = torch.empty(65_537, 16, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(65_537, 8, 128, dtype=torch.bfloat16, device="meta")
    cu_seqlens = torch.empty(33, dtype=torch.int32, device="meta")
    with compiled_launches(target) as reports:
        kernels, args = TritonAttention(), (q, k, k, cu_seqlens, cu_seqlens, 0.1, True, None, False)
        output, lse = kernels.forward(*args)
        kernels.backward(args, (output, lse), (output,), (True, True, True, False, False))
    names = ["attention_forward", "attention_query_gradient", "attention_key_gradients"]
    assert [report.kernel for report in reports] == names
    for report in reports:
        # A few addresses wait in local memory while the sums fill 255 registers; smaller tiles would read more.
        assert_compiled_well(report, dots=True, spill_allowance_bytes=96)


@pytest.mark.parametrize("target", TARGETS)
def test_decoding(target):
    q = torch.empty(64, 16, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(64, 8, 8192, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    with compiled_launches(target) as reports:
        attention_decode_triton(q, cache, cache, torch.empty(64, dtype=torch.int64, device="meta"), 0.1)
    assert [report.kernel for report in reports] == ["decode_split", "decode_sum"]
    # Two query heads a key head fill a tile of 16 rows: too few for a warpgroup.
    assert_compiled_well(reports[0], dots=True, warpgroup_dots=False)
    assert_compiled_well(reports[1], dots=False)
