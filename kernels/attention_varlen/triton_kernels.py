"""Packed attention, forward and backward, as Triton kernels over tiles of queries and keys; scores are never stored.

    forward   o = softmax(scale q k^T) v by the running maximum and sum of arXiv:2205.14135, algorithm 1
    backward  p = exp(s - lse), dp = do v^T, ds = p (dp - delta), delta = sum(do o)     (arXiv:2307.08691, algorithm 2)
              dq = scale ds k in one kernel; dk = scale ds^T q, dv = p^T do in another; no atomics, so the bits repeat

The grid size follows from shapes alone, so the host never reads cu_seqlens. A sequence s of n tokens that starts at token b owns
the tiles from number b // BLOCK + s up to, but not including, (b + n) // BLOCK + s + 1, which is the next sequence's first tile.
These are at least ceil(n / BLOCK) tiles, of which at most one is empty. A program finds its sequence by bisection in cu_seqlens.

Exponents are to base 2 (scale2 = scale * log2 e), as in hardware. tl.dot reads tiles in the dtype of the inputs; all other
arithmetic is float32.
"""
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def sequence_of_tile(cu_seqlens, tile, num_sequences, BLOCK: tl.constexpr):
    """Return the sequence that owns this tile, the last one whose first tile is not after it."""
    low = tl.zeros((), tl.int32)
    high = low + num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_not_behind = (tl.load(cu_seqlens + middle) // BLOCK).to(tl.int32) + middle <= tile
        low = tl.where(is_not_behind, middle, low)
        high = tl.where(is_not_behind, high, middle - 1)
    return low


@triton.jit
def bounds_of(cu_seqlens, sequence):
    """Return the first token (int64) and the number of tokens (int32) of a sequence."""
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    return begin, (tl.load(cu_seqlens + sequence + 1).to(tl.int64) - begin).to(tl.int32)


@triton.jit
def forward_over_keys(
    output,
    maximum,
    total,
    q_tile,
    k,
    v,
    begin_k,
    num_keys,
    last_visible,
    first,
    end,
    stride_k,
    stride_v,
    scale2,
    HEAD_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add the sequence's keys from `first` to `end` to the running sums, and return the sums.

    last_visible: [M], the last key that each query sees.
    """
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_SIZE)
    for start in range(first, end, BLOCK_N):
        keys = start + columns
        at = begin_k + start
        k_at = k + at * stride_k + columns[:, None] * stride_k + dims[None, :]
        v_at = v + at * stride_v + columns[:, None] * stride_v + dims[None, :]
        if IS_MASKED:
            k_tile = tl.load(k_at, mask=keys[:, None] < num_keys, other=0.0)
            v_tile = tl.load(v_at, mask=keys[:, None] < num_keys, other=0.0)
        else:
            k_tile = tl.load(k_at)
            v_tile = tl.load(v_at)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale2
        if IS_MASKED:
            scores = tl.where(keys[None, :] <= last_visible[:, None], scores, float("-inf"))
        risen = tl.maximum(maximum, tl.max(scores, 1))
        shrink = tl.exp2(maximum - risen)
        p = tl.exp2(scores - risen[:, None])
        total = total * shrink + tl.sum(p, 1)
        output = tl.dot(p.to(v_tile.dtype), v_tile, output * shrink[:, None], input_precision="ieee")
        maximum = risen
    return output, maximum, total


@triton.jit
def attention_forward(
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_k,
    num_sequences,
    num_tokens,
    num_heads,
    scale2,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Compute the output and its log-sum-exp for one tile of queries of one head.

    out: [T, N, D]. lse: [N, T] float32, to base 2.
    """
    head = (tl.program_id(0) % num_heads).to(tl.int64)  # neighbouring programs share keys and values (GQA)
    tile = tl.program_id(0) // num_heads
    sequence = sequence_of_tile(cu_seqlens_q, tile, num_sequences, BLOCK_M)
    begin_q, num_queries = bounds_of(cu_seqlens_q, sequence)
    begin_k, num_keys = bounds_of(cu_seqlens_k, sequence)
    # Start with the last tile: under a causal mask it has the most keys.
    number = tl.cdiv(num_queries, BLOCK_M) - 1 - (tile - sequence - (begin_q // BLOCK_M).to(tl.int32))
    if number < 0:
        return
    first_query = number * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_SIZE)
    is_query = first_query + rows < num_queries
    at = begin_q + first_query
    q_at = q + head * stride_q_head + at * stride_q + rows[:, None] * stride_q + dims[None, :]
    q_tile = tl.load(q_at, mask=is_query[:, None], other=0.0)
    k += head // GROUP * stride_k_head
    v += head // GROUP * stride_v_head

    if IS_CAUSAL:
        shift = num_keys - num_queries
        last_visible = tl.minimum(first_query + rows + shift, num_keys - 1)
        num_seen_by_all = tl.minimum(tl.maximum(first_query + shift + 1, 0), num_keys)
        num_seen = tl.minimum(first_query + BLOCK_M + shift, num_keys)
    else:
        last_visible = tl.zeros([BLOCK_M], tl.int32) + (num_keys - 1)
        num_seen_by_all = num_keys
        num_seen = num_keys
    unmasked = num_seen_by_all // BLOCK_N * BLOCK_N  # keys in whole blocks that every query of the tile sees

    output = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output, maximum, total = forward_over_keys(
        output, maximum, total, q_tile, k, v, begin_k, num_keys, last_visible, 0, unmasked,
        stride_k, stride_v, scale2, HEAD_SIZE, BLOCK_N, False,
    )  # fmt: skip
    output, maximum, total = forward_over_keys(
        output, maximum, total, q_tile, k, v, begin_k, num_keys, last_visible, unmasked, num_seen,
        stride_k, stride_v, scale2, HEAD_SIZE, BLOCK_N, True,
    )  # fmt: skip

    out_at = out + ((at + rows[:, None]) * num_heads + head) * HEAD_SIZE + dims[None, :]
    tl.store(out_at, (output / total[:, None]).to(out.dtype.element_ty), mask=is_query[:, None])
    tl.store(lse + head * num_tokens + at + rows, maximum + tl.log2(total), mask=is_query)


@triton.jit
def attention_query_gradient(
    q,
    k,
    v,
    out,
    grad_out,
    lse,
    delta,
    grad_q,
    cu_seqlens_q,
    cu_seqlens_k,
    num_sequences,
    num_tokens,
    num_heads,
    scale,
    scale2,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_grad,
    stride_grad_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Compute the gradient of one tile of queries of one head.

    grad_q: [T, N, D]. delta: [N, T] float32, sum(do o) of each query, which the next kernel reads.
    """
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tile = tl.program_id(0) // num_heads
    sequence = sequence_of_tile(cu_seqlens_q, tile, num_sequences, BLOCK_M)
    begin_q, num_queries = bounds_of(cu_seqlens_q, sequence)
    begin_k, num_keys = bounds_of(cu_seqlens_k, sequence)
    # Start with the last tile, as in attention_forward.
    number = tl.cdiv(num_queries, BLOCK_M) - 1 - (tile - sequence - (begin_q // BLOCK_M).to(tl.int32))
    if number < 0:
        return
    first_query = number * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_SIZE)
    is_query = first_query + rows < num_queries
    at = begin_q + first_query
    q_at = q + head * stride_q_head + at * stride_q + rows[:, None] * stride_q + dims[None, :]
    grad_at = grad_out + head * stride_grad_head + at * stride_grad + rows[:, None] * stride_grad + dims[None, :]
    packed = ((at + rows[:, None]) * num_heads + head) * HEAD_SIZE + dims[None, :]  # index into contiguous [T, N, D]
    statistic = head * num_tokens + at + rows  # index into [N, T]
    q_tile = tl.load(q_at, mask=is_query[:, None], other=0.0)
    grad_tile = tl.load(grad_at, mask=is_query[:, None], other=0.0)
    out_tile = tl.load(out + packed, mask=is_query[:, None], other=0.0)
    row_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    row_lse = tl.load(lse + statistic, mask=is_query, other=0.0)
    tl.store(delta + statistic, row_delta, mask=is_query)
    k += head // GROUP * stride_k_head
    v += head // GROUP * stride_v_head

    if IS_CAUSAL:
        shift = num_keys - num_queries
        last_visible = tl.minimum(first_query + rows + shift, num_keys - 1)
        num_seen = tl.minimum(first_query + BLOCK_M + shift, num_keys)
    else:
        last_visible = tl.zeros([BLOCK_M], tl.int32) + (num_keys - 1)
        num_seen = num_keys

    columns = tl.arange(0, BLOCK_N)
    gradient = tl.zeros([BLOCK_M, HEAD_SIZE], tl.float32)
    for start in range(0, num_seen, BLOCK_N):
        keys = start + columns
        at_k = begin_k + start
        k_at = k + at_k * stride_k + columns[:, None] * stride_k + dims[None, :]
        v_at = v + at_k * stride_v + columns[:, None] * stride_v + dims[None, :]
        k_tile = tl.load(k_at, mask=keys[:, None] < num_keys, other=0.0)
        v_tile = tl.load(v_at, mask=keys[:, None] < num_keys, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale2
        p = tl.exp2(scores - row_lse[:, None])
        p = tl.where(keys[None, :] <= last_visible[:, None], p, 0.0)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - row_delta[:, None])
        gradient = tl.dot(ds.to(k_tile.dtype), k_tile, gradient, input_precision="ieee")
    tl.store(grad_q + packed, (gradient * scale).to(grad_q.dtype.element_ty), mask=is_query[:, None])


@triton.jit
def attention_key_gradients(
    q,
    k,
    v,
    grad_out,
    lse,
    delta,
    grad_k,
    grad_v,
    cu_seqlens_q,
    cu_seqlens_k,
    num_sequences,
    num_tokens,
    num_key_heads,
    scale,
    scale2,
    stride_q,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    stride_grad,
    stride_grad_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    """Compute the gradients of one tile of keys and values of one key head.

    grad_k, grad_v: [T_k, N_kv, D], summed over the query heads that share the key head.
    """
    key_head = (tl.program_id(0) % num_key_heads).to(tl.int64)
    tile = tl.program_id(0) // num_key_heads
    sequence = sequence_of_tile(cu_seqlens_k, tile, num_sequences, BLOCK_N)
    begin_q, num_queries = bounds_of(cu_seqlens_q, sequence)
    begin_k, num_keys = bounds_of(cu_seqlens_k, sequence)
    number = tile - sequence - (begin_k // BLOCK_N).to(tl.int32)  # the first tile has the most queries
    first_key = number * BLOCK_N
    if first_key >= num_keys:
        return
    columns = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD_SIZE)
    keys = first_key + columns
    is_key = keys < num_keys
    at = begin_k + first_key
    k_at = k + key_head * stride_k_head + at * stride_k + columns[:, None] * stride_k + dims[None, :]
    v_at = v + key_head * stride_v_head + at * stride_v + columns[:, None] * stride_v + dims[None, :]
    k_tile = tl.load(k_at, mask=is_key[:, None], other=0.0)
    v_tile = tl.load(v_at, mask=is_key[:, None], other=0.0)

    shift = num_keys - num_queries  # query i sees the keys up to i + shift
    first_query = 0
    if IS_CAUSAL:
        first_query = tl.maximum(first_key - shift, 0) // BLOCK_M * BLOCK_M

    rows = tl.arange(0, BLOCK_M)
    of_k = tl.zeros([BLOCK_N, HEAD_SIZE], tl.float32)
    of_v = tl.zeros([BLOCK_N, HEAD_SIZE], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        for start in range(first_query, num_queries, BLOCK_M):
            queries = start + rows
            # Queries past the end are loaded as 0 with lse = delta = 0, so they add 0 to both gradients.
            is_query = queries < num_queries
            at_q = begin_q + start
            q_at = q + head * stride_q_head + at_q * stride_q + rows[:, None] * stride_q + dims[None, :]
            grad_at = grad_out + head * stride_grad_head + at_q * stride_grad + rows[:, None] * stride_grad
            statistic = head * num_tokens + at_q + rows
            q_tile = tl.load(q_at, mask=is_query[:, None], other=0.0)
            grad_tile = tl.load(grad_at + dims[None, :], mask=is_query[:, None], other=0.0)
            row_lse = tl.load(lse + statistic, mask=is_query, other=0.0)
            row_delta = tl.load(delta + statistic, mask=is_query, other=0.0)
            # Scores are transposed, [keys, queries], so that p and ds are the left operands of their products.
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * scale2
            p = tl.exp2(scores - row_lse[None, :])
            if IS_CAUSAL:
                p = tl.where(keys[:, None] <= queries[None, :] + shift, p, 0.0)
            of_v = tl.dot(p.to(grad_tile.dtype), grad_tile, of_v, input_precision="ieee")
            dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision="ieee")
            ds = p * (dp - row_delta[None, :])
            of_k = tl.dot(ds.to(q_tile.dtype), q_tile, of_k, input_precision="ieee")

    packed = ((at + columns[:, None]) * num_key_heads + key_head) * HEAD_SIZE + dims[None, :]
    tl.store(grad_k + packed, (of_k * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_v + packed, of_v.to(grad_v.dtype.element_ty), mask=is_key[:, None])
