"""Reference definition of attention with one query per sequence over a padded cache: a masked softmax."""

import torch
from torch import Tensor


def attention_decode_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Return the output [S, N, D]; query head n reads key head n // (N / N_kv)."""
    repeats = q.shape[1] // k_cache.shape[2]
    is_padding = torch.arange(k_cache.shape[1], device=q.device) >= lengths[:, None]  # [S, L]
    keys, values = (cache.repeat_interleave(repeats, dim=2) for cache in (k_cache, v_cache))
    scores = torch.einsum("snd,slnd->snl", q, keys) * scale
    weights = scores.masked_fill(is_padding[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("snl,slnd->snd", weights, values)
