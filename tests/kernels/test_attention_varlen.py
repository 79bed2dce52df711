"""attention_varlen against a masked softmax per segment; also in interpreter/test_ops.py."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from every_op import IS_INTERPRETED
from judging import judge
from torch import Tensor

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen import _OP, cpu
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference
from marsrl.kernels.dispatch import Explanation

# One segment; equal segments (no padding); one bucket with padding; three buckets, and empty segments.
LENGTHS = [[7], [5, 5, 5], [9, 5, 7], [40, 0, 3, 17, 1, 18, 0, 2]]
DTYPES, SCALES = [torch.float32, torch.bfloat16], [-0.7, -1e-3, 0.0, 3.0]
if IS_INTERPRETED:
    # Several tiles of queries and keys; sequences that are empty, shorter than a tile, and end at a tile's end.
    LENGTHS, DTYPES, SCALES = [[17], [11, 0, 3, 8]], [*DTYPES, torch.float16], [-0.7, 0.0]


def choice(device: str, dtype: torch.dtype, head_size: int, *, deterministic: bool = False) -> Explanation:
    """Return which implementation serves packed attention with these properties on this machine, and why others do not."""
    q = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, head_size))
    return _OP.explain(lambda each: each.machine_lacks() or each.why_not(q, deterministic))


def compare(
    lengths: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 8,
    scale: float | None = None,
    device: str = "cpu",
    attention: Callable[..., Tensor] = attention_varlen,
    repeats: bool = True,
) -> None:
    """Compare attention with the definition. q, k and v are views of one tensor if lengths_k is None.

    repeats: check that results are bitwise reproducible.
    """
    keys = lengths_k or lengths
    cu_seqlens, cu_seqlens_k = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in (lengths, keys)
    )
    num_heads, num_key_heads = heads
    shapes = (sum(lengths), num_heads), (sum(keys), num_key_heads), (sum(keys), num_key_heads)
    q, k, v = (torch.randn(*shape, head_size, device=device).to(dtype) for shape in shapes)
    if lengths_k is None:
        q, k, v = torch.cat((q, k, v), dim=1).split([num_heads, num_key_heads, num_key_heads], dim=1)
    words = {"cu_seqlens_k": None if lengths_k is None else cu_seqlens_k, "causal": causal, "scale": scale}
    exact_scale = head_size**-0.5 if scale is None else scale
    judge(
        ("output", "q.grad", "k.grad", "v.grad"),
        lambda q, k, v: attention(q, k, v, cu_seqlens, **words),
        lambda q, k, v: attention_varlen_reference(q, k, v, cu_seqlens, cu_seqlens_k, exact_scale, causal),
        (q, k, v),
        [torch.randn(q.shape, dtype=torch.float64, device=device)],
        # Terms of the longest sum: a query's keys, a key's queries in all heads of its group, or the size of a head.
        terms=[max(*keys, *(n * num_heads // num_key_heads for n in lengths), head_size)] * 4,
        repeats=repeats,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_causal_self_attention(lengths, dtype, implementation):
    compare(lengths, dtype=dtype, head_size=16)


# Grouped heads; attention without a causal mask; queries that are the last tokens of longer keys and also see the prefix.
@pytest.mark.parametrize(
    "lengths, lengths_k, words",
    [
        ([6, 3], None, {"heads": (4, 4), "scale": 0.7}),
        ([6, 3], None, {"heads": (4, 1), "scale": 0.7}),
        ([6, 0, 3], None, {"causal": False}),
        ([3, 0, 9], [5, 1, 10], {"causal": False, "heads": (2, 1)}),
        ([3, 1, 0, 4], [5, 13, 2, 4], {}),
    ],
)
def test_heads_keys_and_masks(lengths, lengths_k, words, implementation):
    compare(lengths, lengths_k, head_size=16, **words)


def test_each_block_of_queries_sees_the_keys_before_it(monkeypatch):
    monkeypatch.setattr(cpu, "_BLOCK", 4)
    for dtype in DTYPES:
        compare([9, 3, 8, 0], [15, 30, 8, 2], head_size=16, dtype=dtype)


@pytest.mark.parametrize("scale", SCALES)
def test_any_finite_scale_is_served(scale, implementation):
    """Cases with and without a causal mask, with padded segments and cross-attention."""
    for dtype in (torch.float32, torch.bfloat16):
        compare([6, 0, 3], scale=scale, dtype=dtype, head_size=16)
    compare([6, 0, 3], scale=scale, causal=False, head_size=16)
    compare([3, 1], [5, 6], scale=scale, head_size=16)


def test_a_nan_stays_in_its_sequence_and_its_gradients(implementation):
    q, k, v = torch.randn(3, 9, 1, 16).unbind()
    for x in (q, k, v):
        x[5:] = torch.nan
        x.requires_grad_()
    output = attention_varlen(q, k, v, torch.tensor([0, 5, 9]))
    output.backward(torch.ones_like(output))
    assert all(x[:5].isfinite().all() for x in (output, q.grad, k.grad, v.grad))


def test_no_tokens(implementation):
    """Cases: a sequence without tokens, no sequence, and a sequence with keys but no queries."""
    for bounds, num_keys in (([0, 0], 0), ([0], 0), ([0, 0], 3)):
        leaves = [torch.randn(n, heads, 16, requires_grad=True) for n, heads in ((0, 4), (num_keys, 2), (num_keys, 2))]
        keys = torch.tensor([0, num_keys]) if num_keys else None
        output = attention_varlen(*leaves, torch.tensor(bounds), cu_seqlens_k=keys)
        assert output.shape == (0, 4, 16)
        for leaf, grad in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape and not grad.any()


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
    attention = partial(attention_varlen, deterministic=repeats)
    words = {"dtype": dtype, "head_size": head_size, "device": "cuda", "attention": attention, "repeats": repeats}
    compare([1900, 1, 0, 640, 77, 128], heads=(16, 8), **words)  # several tiles, exactly one, shorter, and empty
    compare([900, 3, 60], [1000, 40, 60], heads=(4, 1), **words)


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [16, 32, 256])
def test_other_head_sizes_on_a_gpu(head_size, monkeypatch):
    monkeypatch.setenv("MARSRL_KERNELS", "triton")
    compare([300, 0, 41], dtype=torch.bfloat16, heads=(4, 2), head_size=head_size, device="cuda")
    compare([300, 0, 41], causal=False, heads=(4, 2), head_size=head_size, device="cuda")
