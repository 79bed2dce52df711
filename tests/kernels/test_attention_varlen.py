"""attention_varlen: SDPA on padded buckets against a masked softmax per segment."""

import pytest
import torch

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference
from marsrl.kernels.testing import assert_accurate


def run(function, q, k, v, upstream, dtype):
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    output = function(q, k, v)
    (output * upstream.to(output.dtype)).sum().backward()
    return output.detach(), q.grad, k.grad, v.grad


def compare(lengths, lengths_k=None, causal=True, dtype=torch.float32, heads=(4, 2), scale=None):
    bounds, bounds_k = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in (lengths, lengths_k or lengths))
    q = torch.randn(bounds[-1], heads[0], 8).to(dtype)
    k, v = (torch.randn(bounds_k[-1], heads[1], 8).to(dtype) for _ in range(2))
    upstream = torch.randn_like(q, dtype=torch.float64)
    cu_seqlens_k = torch.tensor(bounds_k, dtype=torch.int32) if lengths_k else None

    def ours(q, k, v):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        return attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens_k, causal=causal, scale=scale)

    def reference(q, k, v):
        return attention_varlen_reference(q, k, v, bounds, bounds_k, 8**-0.5 if scale is None else scale, causal)

    found = run(ours, q, k, v, upstream, dtype)
    exact, plain = (run(reference, q, k, v, upstream, d) for d in (torch.float64, dtype))
    for name, *values in zip(("output", "q.grad", "k.grad", "v.grad"), found, exact, plain):
        assert_accurate(name, *values)


# one segment; equal ones (no padding); one bucket with padding; three buckets with empty segments
LENGTHS = [[7], [5, 5, 5], [9, 5, 7], [40, 0, 3, 17, 1, 18, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_self_attention(lengths, dtype):
    compare(lengths, dtype=dtype)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_head_groupings_and_scale(heads):
    compare([6, 3], heads=heads, scale=0.7)


def test_every_key_is_seen_without_causal():
    compare([6, 0, 3], causal=False)


def test_queries_at_the_end_of_longer_keys_see_the_prefix():
    compare([3, 1, 0, 4], [5, 6, 2, 4])


def test_a_nan_in_one_sequence_stays_there():
    q, k, v = torch.randn(3, 9, 2, 8).unbind()
    for x in (q, k, v):
        x[5:] = torch.nan
    assert attention_varlen(q, k, v, torch.tensor([0, 5, 9]))[:5].isfinite().all()


def test_a_single_token_attends_to_itself():
    q, k, v = torch.randn(3, 4, 2, 8).unbind()
    q.requires_grad_()
    output = attention_varlen(q, k, v, torch.arange(5))
    output.sum().backward()
    torch.testing.assert_close(output, v)
    torch.testing.assert_close(q.grad, torch.zeros_like(q), atol=1e-5, rtol=0)


def test_no_tokens():
    x = torch.randn(0, 2, 8)
    assert attention_varlen(x, x, x, torch.tensor([0, 0])).shape == (0, 2, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.randn(5, 2, 4)}, r"k has shape \[5, 2, 4\], expected \[any, any, 8\]"),
        ({"k": torch.randn(5, 3, 8), "v": torch.randn(5, 3, 8)}, "k has 3 heads, expected a divisor of q's 4"),
        ({"v": torch.randn(5, 2, 8).bfloat16()}, "v has dtype bfloat16, expected float32"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens is \[0, 4\], expected to rise from 0 to 5 tokens"),
        (
            {"cu_seqlens": torch.tensor([0, 1, 5]), "cu_seqlens_k": torch.tensor([0, 3, 5])},
            "cu_seqlens_k gives sequence 1 2 keys for 4 queries",
        ),
    ],
)
def test_wrong_arguments_are_named_with_what_was_expected(change, message):
    arguments = {"q": torch.randn(5, 4, 8), "k": torch.randn(5, 2, 8), "v": torch.randn(5, 2, 8)}
    with pytest.raises(ValueError, match="attention_varlen: " + message):
        attention_varlen(**{**arguments, "cu_seqlens": torch.tensor([0, 5]), **change})
