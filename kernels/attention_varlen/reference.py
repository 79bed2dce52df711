"""Reference definition of attention within packed sequences: a masked softmax per sequence."""

import torch
from torch import Tensor


def attention_varlen_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    *_: object,
) -> Tensor:
    """Return the output [T, N, D].

    If causal, query i of a sequence with m queries and n keys sees the keys up to i + n - m.
    """
    outputs = []
    bounds_q, bounds_k = cu_seqlens.tolist(), cu_seqlens_k.tolist()
    repeats = q.shape[1] // k.shape[1]
    for begin, end, begin_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        keys = k[begin_k:end_k].repeat_interleave(repeats, dim=1)
        values = v[begin_k:end_k].repeat_interleave(repeats, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q[begin:end], keys) * scale
        if causal:
            num_queries, num_keys = end - begin, end_k - begin_k
            every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(every.triu(num_keys - num_queries + 1), -torch.inf)
        outputs.append(torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), values))
    return torch.cat(outputs) if outputs else torch.zeros_like(q)
