"""Decoding attention as two Triton kernels: the first attends within splits of fixed size, the second sums a sequence's splits.

The size of a split depends neither on the batch nor on the cache's capacity, and the second kernel adds the splits in order, so
the bits of a sequence's output do not depend on the rest of the batch. Exponents are to base 2. Each split stores its sum of
exponentials, not the sum's logarithm: an error in rounding the logarithm would scale the split's whole contribution.
"""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def decode_split(
    q,
    k,
    v,
    partial,
    maxima,
    totals,
    lengths,
    num_splits,
    num_key_heads,
    scale2,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_token,
    stride_k_head,
    stride_v,
    stride_v_token,
    stride_v_head,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUP, padded to a size that tl.dot accepts
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Compute the attention over one split, for all query heads that share one key head.

    Writes the unnormalised outputs partial [S, N, splits, D], the largest scores maxima and the sums of exponentials totals, both
    [S, N, splits]. All are float32.
    """
    sequence = (tl.program_id(0) // num_key_heads).to(tl.int64)
    key_head = (tl.program_id(0) % num_key_heads).to(tl.int64)
    split = tl.program_id(1)
    length = tl.load(lengths + sequence).to(tl.int32)
    first = split * SPLIT
    if first >= length:
        return
    end = tl.minimum(first + SPLIT, length)

    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, HEAD_SIZE)
    columns = tl.arange(0, BLOCK_N)
    is_head = members < GROUP
    heads = key_head * GROUP + members
    q_at = q + sequence * stride_q + heads[:, None] * stride_q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=is_head[:, None], other=0.0)
    k += sequence * stride_k + key_head * stride_k_head
    v += sequence * stride_v + key_head * stride_v_head

    output = tl.zeros([BLOCK_G, HEAD_SIZE], tl.float32)
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(first, end, BLOCK_N):
        keys = (start + columns).to(tl.int64)
        is_known = keys < end
        k_tile = tl.load(k + keys[:, None] * stride_k_token + dims[None, :], mask=is_known[:, None], other=0.0)
        v_tile = tl.load(v + keys[:, None] * stride_v_token + dims[None, :], mask=is_known[:, None], other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale2
        scores = tl.where(is_known[None, :], scores, float("-inf"))
        risen = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - risen)
        p = tl.exp2(scores - risen[:, None])
        total = total * shrink + tl.sum(p, 1)
        block = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
        # Add the block's sum here instead of accumulating in tl.dot: one chain of SPLIT additions has a larger rounding error.
        output = tl.fma(output, shrink[:, None], block)
        maximum = risen

    at = (sequence * num_key_heads * GROUP + heads) * num_splits + split  # index into [S, N, splits]
    tl.store(partial + at[:, None] * HEAD_SIZE + dims[None, :], output, mask=is_head[:, None])
    tl.store(maxima + at, maximum, mask=is_head)
    tl.store(totals + at, total, mask=is_head)


@triton.jit
def decode_sum(
    partial,
    maxima,
    totals,
    lengths,
    out,
    num_splits,
    num_heads,
    HEAD_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Sum the splits of one head and sequence, each weighted by its share of the softmax.

    Splits without keys are skipped.
    """
    row = tl.program_id(0).to(tl.int64)  # index into [S, N]
    length = tl.load(lengths + row // num_heads).to(tl.int32)
    dims = tl.arange(0, HEAD_SIZE)
    output = tl.zeros([HEAD_SIZE], tl.float32)
    maximum = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for split in range(0, tl.cdiv(length, SPLIT)):
        at = row * num_splits + split
        of_split = tl.load(maxima + at)
        risen = tl.maximum(maximum, of_split)
        shrink = tl.exp2(maximum - risen)
        weight = tl.exp2(of_split - risen)
        output = output * shrink + weight * tl.load(partial + at * HEAD_SIZE + dims)
        total = total * shrink + weight * tl.load(totals + at)
        maximum = risen
    tl.store(out + row * HEAD_SIZE + dims, (output / total).to(out.dtype.element_ty))
