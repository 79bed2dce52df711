"""attention_varlen: SDPA on padded buckets against a masked softmax per segment."""

from functools import partial

import pytest
import torch
from attention_cases import SCALES, check_scale, check_without_queries, choice, compare

from marsrl.kernels import attention_varlen

# one segment; equal ones (no padding); one bucket with padding; three buckets with empty segments
LENGTHS = [[7], [5, 5, 5], [9, 5, 7], [40, 0, 3, 17, 1, 18, 0, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_self_attention(lengths, dtype):
    compare(lengths, dtype=dtype)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_head_groupings_and_scale(heads):
    compare([6, 3], heads=heads, scale=0.7)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("scale", SCALES)
def test_any_finite_scale_is_served(scale, implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_scale(scale)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_is_named(scale):
    x = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match=f"attention_varlen: scale is {scale}, expected a finite number or None"):
        attention_varlen(x, x, x, torch.tensor([0, 3]), scale=scale)


def test_every_key_is_seen_without_causal():
    compare([6, 0, 3], causal=False)


def test_queries_at_the_end_of_longer_keys_see_the_prefix():
    compare([3, 1, 0, 4], [5, 6, 2, 4])


REALISTIC = [1900, 1, 0, 640, 77, 128]  # a tile, less, more, none


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "torch", "flash4", "flash3", "flash2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [64, 128])
def test_on_a_gpu(implementation, dtype, head_size, monkeypatch):
    repeats = implementation not in ("torch", "flash4")
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


def test_a_nan_in_one_sequence_stays_there():
    q, k, v = torch.randn(3, 9, 2, 8).unbind()
    for x in (q, k, v):
        x[5:] = torch.nan
    assert attention_varlen(q, k, v, torch.tensor([0, 5, 9]))[:5].isfinite().all()


def test_what_was_packed_without_gradients_first_has_them_afterwards():
    """A learner packs as an engine in its process has packed before, in inference mode."""
    cu_seqlens = torch.tensor([0, 7, 12, 13])
    with torch.inference_mode():
        attention_varlen(*(torch.randn(13, 2, 8) for _ in range(3)), cu_seqlens)
    q = torch.randn(13, 2, 8, requires_grad=True)
    attention_varlen(q, torch.randn(13, 2, 8), torch.randn(13, 2, 8), cu_seqlens).sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


def test_a_single_token_attends_to_itself():
    q, k, v = torch.randn(3, 4, 2, 8).unbind()
    q.requires_grad_()
    output = attention_varlen(q, k, v, torch.arange(5))
    output.sum().backward()
    torch.testing.assert_close(output, v)
    torch.testing.assert_close(q.grad, torch.zeros_like(q), atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_no_tokens(implementation, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", implementation)
    check_without_queries()


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
