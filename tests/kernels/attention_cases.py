"""Value and gradients of packed attention against a masked softmax per segment, for any implementation and device."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from every_op import IS_INTERPRETED
from judging import judge
from torch import Tensor

from marsrl.kernels import attention_varlen
from marsrl.kernels.attention_varlen import _OP
from marsrl.kernels.attention_varlen.reference import attention_varlen_reference
from marsrl.kernels.dispatch import Explanation

SCALES = (-0.7, 0.0) if IS_INTERPRETED else (-0.7, -1e-3, 0.0, 3.0)


def choice(device: str, dtype: torch.dtype, head_size: int, *, deterministic: bool = False) -> Explanation:
    """The implementation that serves packed attention of that kind on this machine, and the reasons against the others."""
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
    """attention takes what attention_varlen takes; repeats: with the same bits. q, k and v are views of one tensor where
    their lengths agree."""
    cu_seqlens, cu_seqlens_k = (
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device=device)
        for x in (lengths, lengths_k or lengths)
    )
    num_heads, num_key_heads = heads
    q = torch.randn(sum(lengths), num_heads, head_size, device=device).to(dtype)
    k, v = (torch.randn(sum(lengths_k or lengths), num_key_heads, head_size, device=device).to(dtype) for _ in range(2))
    if lengths_k is None:
        q, k, v = torch.cat((q, k, v), dim=1).split([num_heads, num_key_heads, num_key_heads], dim=1)
    upstream = torch.randn(q.shape, dtype=torch.float64, device=device)
    given_k = None if lengths_k is None else cu_seqlens_k

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, cu_seqlens, cu_seqlens_k=given_k, causal=causal, scale=scale)

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exact_scale = head_size**-0.5 if scale is None else scale
        return attention_varlen_reference(q, k, v, cu_seqlens, cu_seqlens_k, exact_scale, causal)

    # the longest sum: over the keys of a query, the queries of a key and its group, or a head
    longest = max(*lengths, *(lengths_k or lengths), *(n * num_heads // num_key_heads for n in lengths), head_size)
    names = ("output", "q.grad", "k.grad", "v.grad")
    judge(names, ours, reference, (q, k, v), [upstream], terms=[longest] * 4, repeats=repeats)


def check_scale(scale: float) -> None:
    """With and without a causal mask, over segments that are padded and keys that are not the queries'."""
    for dtype in (torch.float32, torch.bfloat16):
        compare([6, 0, 3], scale=scale, dtype=dtype, head_size=16)
    compare([6, 0, 3], scale=scale, causal=False, head_size=16)
    compare([3, 1], [5, 6], scale=scale, head_size=16)


def check_a_nan_stays_in_its_sequence() -> None:
    """In the output and in the gradients."""
    q, k, v = torch.randn(3, 9, 1, 16).unbind()
    for x in (q, k, v):
        x[5:] = torch.nan
        x.requires_grad_()
    output = attention_varlen(q, k, v, torch.tensor([0, 5, 9]))
    output.backward(torch.ones_like(output))
    assert all(x[:5].isfinite().all() for x in (output, q.grad, k.grad, v.grad))


def check_without_queries() -> None:
    """No token in one sequence or in none, and keys alone."""
    for bounds, num_keys in (([0, 0], 0), ([0], 0), ([0, 0], 3)):
        leaves = [torch.randn(n, heads, 16, requires_grad=True) for n, heads in ((0, 4), (num_keys, 2), (num_keys, 2))]
        keys = torch.tensor([0, num_keys]) if num_keys else None
        output = attention_varlen(*leaves, torch.tensor(bounds), cu_seqlens_k=keys)
        assert output.shape == (0, 4, 16)
        for leaf, grad in zip(leaves, torch.autograd.grad(output.sum(), leaves), strict=True):
            assert grad.shape == leaf.shape and not grad.any()
