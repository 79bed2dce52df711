"""Packed attention on the CPU by PyTorch's SDPA: segments of similar length share one padded call."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries per call of SDPA, if causal queries have more keys than queries. A call computes all products of its queries with its
# keys and masks some; smaller blocks compute fewer masked products, but need more calls.
_BLOCK = 256


@dataclass(frozen=True)
class PaddedSegments:
    """Segments padded to a common length.

    num_segments, length: number of segments B, and their padded length L.
    source: [B * L] int64, the token at each padded position; padding repeats a segment's last token.
    places: [n] int64, the positions of real tokens in source.
    tokens: [n] int64, the tokens at these positions.
    """

    num_segments: int
    length: int
    source: Tensor
    places: Tensor
    tokens: Tensor


@lru_cache(maxsize=64)  # all layers of a model use the same packing
@torch.inference_mode(False)  # the cached result may later be saved for a backward, which inference tensors cannot be
def padded_by_length(bounds: tuple[int, ...]) -> tuple[PaddedSegments, ...]:
    """Group segments by length so that at most half of the positions are padding.

    There are about log2(longest / shortest) groups.
    """
    segments = sorted(
        ((end - begin, begin) for begin, end in pairwise(bounds) if end > begin), key=lambda s: (-s[0], s[1])
    )
    padded, start = [], 0
    while start < len(segments):
        longest = segments[start][0]
        stop = next((i for i in range(start, len(segments)) if 2 * segments[i][0] < longest), len(segments))
        lengths = torch.tensor([length for length, _ in segments[start:stop]], device="cpu")[:, None]
        begins = torch.tensor([begin for _, begin in segments[start:stop]], device="cpu")[:, None]
        offsets = torch.arange(longest, device="cpu")[None]
        source = (begins + torch.minimum(offsets, lengths - 1)).flatten()
        places = (offsets < lengths).flatten().nonzero()[:, 0]
        padded.append(PaddedSegments(stop - start, longest, source, places, source[places]))
        start = stop
    return tuple(padded)


def attention_varlen_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    *_: object,
) -> Tensor:
    """Return [T, N, D] as the reference defines it."""
    if q.shape[0] == 0:
        return q + 0 * (k.sum() + v.sum())  # so that an empty batch gives q, k and v a gradient of 0
    bounds_q = bounds_k = cu_seqlens.tolist()
    if cu_seqlens_k is not cu_seqlens:
        bounds_k = cu_seqlens_k.tolist()
    if not causal or bounds_k != bounds_q:
        return _per_segment(q, k, v, bounds_q, bounds_k, scale, causal)
    # Padding follows the real tokens, so the causal mask hides it, and no other mask is needed.
    padded = padded_by_length(tuple(bounds_q))
    if len(padded) == 1 and padded[0].num_segments * padded[0].length == q.shape[0]:
        return _sdpa(q, k, v, padded[0], scale).flatten(0, 1)
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for segments in padded:
        padded_q, padded_k, padded_v = (x.index_select(0, segments.source) for x in (q, k, v))
        result = _sdpa(padded_q, padded_k, padded_v, segments, scale).flatten(0, 1).index_select(0, segments.places)
        output = output.index_copy(0, segments.tokens, result)
    return output


def _sdpa(q: Tensor, k: Tensor, v: Tensor, segments: PaddedSegments, scale: float) -> Tensor:
    """Attend within padded segments: [B, L, N, D] from tokens [B * L, N, D]."""
    q, k, v = (x.unflatten(0, (segments.num_segments, segments.length)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def _per_segment(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: list[int], bounds_k: list[int], scale: float, causal: bool
) -> Tensor:
    # Split instead of slicing: the backward of each slice would allocate a gradient of the whole tensor.
    sizes_q, sizes_k = ([end - begin for begin, end in pairwise(bounds)] for bounds in (bounds_q, bounds_k))
    outputs = []
    for query, key, value in zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k)):
        if not len(query):
            continue
        end, sees_more = len(key) - len(query), causal and 1 < len(query) < len(key)
        for block in query.split(_BLOCK if sees_more else len(query)):
            end += len(block)
            mask = None
            if sees_more:
                mask = torch.ones(len(block), end, dtype=torch.bool, device="cpu").tril(end - len(block))
            is_causal = causal and 1 < len(query) == len(key)  # A single query, as in decoding, sees every key.
            own_q, own_k, own_v = (x.transpose(0, 1)[None] for x in (block, key[:end], value[:end]))
            output = scaled_dot_product_attention(
                own_q, own_k, own_v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
            )
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
