"""Triton kernels for rows of float32 logits: softmax statistics, the policy objective and gradients.

    row_partials      computes maximum, sum e^d, sum d e^d and target logit of each piece of a row; reads the logits once
    finish_rows       computes a row's log-prob, entropy, maximum and log_sum from its pieces
    join_pieces       combines the pieces of a vocabulary shard's row into its partials (RowKernels.partials)
    policy_terms      computes each token's coefficients, and the sums per agent of each block of tokens
    list_active       lists the active rows, and their index in the gradient buffer
    row_gradients     writes dz of the active rows; reads the logits a second time

The pieces of a row depend only on its length, so a row's result does not depend on how many rows there are. No sum uses atomics,
so every run gives the same bits. Exponentials that are needed once per row are computed in float64: this costs nothing, and keeps
the last digits of log p and 1 - p.
"""

import triton
import triton.language as tl

from marsrl.kernels.head import objective

# Arguments that differ from chunk to chunk: Triton must not compile a separate kernel for each of their values.
VARYING = ("num_rows", "first")
LOWEST = tl.constexpr(-3.4e38)  # initial value of a maximum; the difference of two maxima of -inf would be NaN
# Replaces -inf as an exponent: its exponential is also 0, but its product with 0 is 0 instead of NaN.
NOTHING = tl.constexpr(-1e4)
LOG_RATIO_BOUND = tl.constexpr(objective.LOG_RATIO_BOUND)
NUM_SUMS = tl.constexpr(len(objective.METRICS))


@triton.jit
def token_of(ids, first, rows):
    """Return the token of a row: ids[row], or first + row if the rows are contiguous."""
    tokens = first + rows
    if ids is not None:
        tokens = tl.load(ids + rows)
    return tokens


@triton.jit
def exact_exp(x):
    return tl.exp(x.to(tl.float64)).to(tl.float32)


@triton.jit
def exact_expm1(x):
    """Return e^x - 1 to float32 precision.

    Near 0 two terms of the series are used, with a relative error below x^2 / 6.
    """
    return tl.where(tl.abs(x) < 1e-4, x + 0.5 * x * x, (tl.exp(x.to(tl.float64)) - 1.0).to(tl.float32))


@triton.jit(do_not_specialize=VARYING)
def row_partials(
    logits,  # [num_rows, stride] float32
    stride,  # multiple of 16 (rows are padded), so that loads are 128 bits for any number of columns
    num_rows,
    columns,  # number of real columns; padding after them is not read
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,  # [T] or None
    inverse_of_all,
    partials,  # [4, pieces, num_rows] float32
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the partial softmax statistics of each piece of each row. Grid (num_rows, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    token = token_of(ids, first, row)
    inverse = inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + token)
    begin = piece * PIECE
    end = tl.minimum(begin + PIECE, columns)
    stop = tl.minimum(begin + PIECE, stride)
    x_row = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    maximum = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for offset in range(begin, end, BLOCK):
        column = offset + lanes
        x = tl.load(x_row + column, mask=column < stop, other=float("-inf"))
        x = tl.where(column < end, x, float("-inf"))
        larger = tl.maximum(maximum, tl.max(x, axis=0))
        # Rescale the sums to the larger maximum: d changes by a shift, e^d by a factor.
        shift = tl.maximum((maximum - larger) * inverse, NOTHING)
        factor = tl.exp(shift)
        d = (x - larger) * inverse  # subtracting first gives exactly 0 at the maximum
        e = tl.exp(d)
        weighted = (weighted + shift * total) * factor + tl.where(d < -87.0, 0.0, d * e)
        total = total * factor + e
        maximum = larger
    target = tl.load(targets + token) - first_column
    is_here = (target >= begin) & (target < end)
    logit = tl.load(x_row + target, mask=is_here, other=0.0)
    pieces = tl.num_programs(1)
    at = partials + piece * num_rows + row
    tl.store(at, maximum)
    tl.store(at + pieces * num_rows, tl.sum(total, axis=0))
    tl.store(at + 2 * pieces * num_rows, tl.sum(weighted, axis=0))
    tl.store(at + 3 * pieces * num_rows, logit)


@triton.jit
def joined(partials, pieces, stride, rows, is_row, inverse, BLOCK_PIECES: tl.constexpr):
    """Combine the partials [4, pieces, stride] of each row's pieces.

    Returns (maximum, sum e^d, sum d e^d, target logit), with d relative to the maximum. The sums are float64, the others float32.
    """
    lanes = tl.arange(0, BLOCK_PIECES)
    plane = pieces * stride
    maximum = tl.full(rows.shape, LOWEST, tl.float32)
    for begin in range(0, pieces, BLOCK_PIECES):
        at = partials + (begin + lanes)[:, None] * stride + rows[None, :]
        part = tl.load(at, mask=(begin + lanes < pieces)[:, None] & is_row[None, :], other=LOWEST)
        maximum = tl.maximum(maximum, tl.max(part, axis=0))
    total = tl.zeros(rows.shape, tl.float64)
    weighted = tl.zeros(rows.shape, tl.float64)
    logit = tl.zeros(rows.shape, tl.float32)
    for begin in range(0, pieces, BLOCK_PIECES):
        at = partials + (begin + lanes)[:, None] * stride + rows[None, :]
        is_here = (begin + lanes < pieces)[:, None] & is_row[None, :]
        part = tl.load(at, mask=is_here, other=LOWEST)
        own_total = tl.load(at + plane, mask=is_here, other=0.0).to(tl.float64)
        own_weighted = tl.load(at + 2 * plane, mask=is_here, other=0.0).to(tl.float64)
        shift = tl.maximum((part.to(tl.float64) - maximum[None, :]) * inverse[None, :], NOTHING)
        factor = tl.exp(shift)
        total += tl.sum(own_total * factor, axis=0)
        weighted += tl.sum((own_weighted + shift * own_total) * factor, axis=0)
        logit += tl.sum(tl.load(at + 3 * plane, mask=is_here, other=0.0), axis=0)
    return maximum, total, weighted, logit


@triton.jit
def inverse_at(inverse_temperature, inverse_of_all, tokens, is_row):
    inverse = tl.full(tokens.shape, 0.0, tl.float32) + inverse_of_all
    if inverse_temperature is not None:
        inverse = tl.load(inverse_temperature + tokens, mask=is_row, other=1.0)
    return inverse.to(tl.float64)


@triton.jit(do_not_specialize=VARYING)
def finish_rows(
    partials,  # [4, pieces, stride] float32
    pieces,
    stride,
    num_rows,
    columns,
    ids,
    first,
    targets,
    inverse_temperature,
    inverse_of_all,
    statistics,  # [T] arrays of Statistics
    BLOCK: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """Compute each row's statistics from its pieces.

    A target outside the vocabulary gets log-prob NaN. Grid (blocks of rows).
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    tokens = token_of(ids, first, tl.where(is_row, rows, 0))
    inverse = inverse_at(inverse_temperature, inverse_of_all, tokens, is_row)
    maximum, total, weighted, logit = joined(partials, pieces, stride, rows, is_row, inverse, BLOCK_PIECES)
    total = tl.where(is_row, total, 1.0)
    log_sum = tl.log(total)
    target = tl.load(targets + tokens, mask=is_row, other=0)
    logp = (logit.to(tl.float64) - maximum) * inverse - log_sum
    logp = tl.where(logp > 0, 0.0, logp)  # rounding can make it positive; NaN stays
    logp = tl.where((target >= 0) & (target < columns), logp, float("nan"))
    logprobs, entropy, maximum_of, log_sum_of = statistics
    tl.store(logprobs + tokens, logp.to(tl.float32), mask=is_row)
    tl.store(entropy + tokens, (log_sum - weighted / total).to(tl.float32), mask=is_row)
    tl.store(maximum_of + tokens, maximum, mask=is_row)
    tl.store(log_sum_of + tokens, log_sum.to(tl.float32), mask=is_row)


@triton.jit(do_not_specialize=VARYING)
def join_pieces(
    partials,  # [4, pieces, stride] float32
    pieces,
    stride,
    num_rows,
    ids,
    first,
    inverse_temperature,
    inverse_of_all,
    out,  # [4, num_rows] float64
    BLOCK: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
):
    """Compute this shard's partials (RowKernels.partials) from each row's pieces. Grid (blocks of rows)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    tokens = token_of(ids, first, tl.where(is_row, rows, 0))
    inverse = inverse_at(inverse_temperature, inverse_of_all, tokens, is_row)
    maximum, total, weighted, logit = joined(partials, pieces, stride, rows, is_row, inverse, BLOCK_PIECES)
    maximum = tl.where(maximum <= LOWEST, float("-inf"), maximum)  # this shard holds only padding
    tl.store(out + rows, maximum.to(tl.float64), mask=is_row)
    tl.store(out + num_rows + rows, total, mask=is_row)
    tl.store(out + 2 * num_rows + rows, weighted, mask=is_row)
    tl.store(out + 3 * num_rows + rows, logit.to(tl.float64), mask=is_row)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def clamped(log_ratio):
    """Clamp to +-LOG_RATIO_BOUND; NaN stays NaN."""
    log_ratio = tl.where(log_ratio > LOG_RATIO_BOUND, LOG_RATIO_BOUND, log_ratio)
    return tl.where(log_ratio < -LOG_RATIO_BOUND, -LOG_RATIO_BOUND, log_ratio)


@triton.jit
def divergence(x, KL: tl.constexpr):
    """Estimate the KL divergence by k1, k2 or k3 from x = log p - log p_reference."""
    if KL == "k1":
        return x
    elif KL == "k2":
        return 0.5 * x * x
    else:
        bounded = clamped(x)
        return exact_expm1(-bounded) + bounded  # e^-x + x - 1 without cancellation near 0


@triton.jit
def clipped_surrogate(
    log_ratio, advantage, logp, clip_low, clip_high, dual_clip, KIND: tl.constexpr, HAS_DUAL_CLIP: tl.constexpr
):
    """Return (surrogate, slope, is_clipped) of a token, for "clip" or "cispo".

    The surrogate is float64; the slope is its derivative with respect to log p.
    """
    ratio = exact_exp(clamped(log_ratio))
    low = 1.0 - clip_low
    high = 1.0 + clip_high
    clipped_ratio = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio))
    if KIND == "cispo":
        slope = clipped_ratio * advantage
        return slope.to(tl.float64) * logp, slope, (ratio < low) | (ratio > high)
    else:
        is_clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
        surrogate = tl.where(is_clipped, clipped_ratio, ratio).to(tl.float64) * advantage
        if HAS_DUAL_CLIP:
            is_beyond = (advantage < 0) & (ratio > dual_clip)
            is_clipped = is_clipped | is_beyond
            surrogate = tl.where(is_beyond, (dual_clip * advantage).to(tl.float64), surrogate)
        is_flat = is_clipped | (tl.abs(log_ratio) > LOG_RATIO_BOUND)
        return surrogate, tl.where(is_flat, 0.0, ratio * advantage), is_clipped


@triton.jit
def put_agent_sums(at, num_agents, agent, is_kept, loss, is_clipped, is_masked, is_clamped, entropy, kl):
    """Store sums over each agent's tokens in the order of objective.METRICS.

    at: address of [num_agents, NUM_SUMS] float64.
    """
    for a in range(num_agents):
        is_mine = is_kept & (agent == a)
        tl.store(at + NUM_SUMS * a, tl.sum(tl.where(is_mine, loss, 0.0), axis=0))
        tl.store(at + NUM_SUMS * a + 1, tl.sum((is_mine & is_clipped).to(tl.float64), axis=0))
        tl.store(at + NUM_SUMS * a + 2, tl.sum((is_mine & is_masked).to(tl.float64), axis=0))
        tl.store(at + NUM_SUMS * a + 3, tl.sum((is_mine & is_clamped).to(tl.float64), axis=0))
        tl.store(at + NUM_SUMS * a + 4, tl.sum(tl.where(is_mine, entropy, 0.0).to(tl.float64), axis=0))
        tl.store(at + NUM_SUMS * a + 5, tl.sum(tl.where(is_mine, kl, 0.0).to(tl.float64), axis=0))
        tl.store(at + NUM_SUMS * a + 6, tl.sum(is_mine.to(tl.float64), axis=0))


@triton.jit(do_not_specialize=VARYING)
def policy_terms(
    num_rows,
    ids,
    first,
    inputs,  # packed arrays [T]; None if not given
    logprobs,
    entropy,
    inverse_normaliser,  # [1] float32
    coefficient,
    entropy_coefficient,
    sums,  # [programs, num_agents, NUM_SUMS] float64
    num_agents,
    numbers,  # PolicyObjective.options; Triton reserves the name `options`
    KIND: tl.constexpr,
    CORRECTION: tl.constexpr,
    KL: tl.constexpr,
    HAS_DUAL_CLIP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Evaluate policy_term of csrc/include/policy_objective.h for a block of tokens.

    Grid (blocks of rows).
    """
    (
        advantages, log_ratio, log_drift, old_logprobs, rollout_logprobs, reference_logprobs, gate, dropped, weights,
        agent_of, mask,
    ) = inputs  # fmt: skip
    clip_low, clip_high, dual_clip, correction_low, correction_high, kl_coef, entropy_coef, mpt_probability = numbers
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_kept = rows < num_rows
    tokens = token_of(ids, first, tl.where(is_kept, rows, 0))
    if mask is not None:
        is_kept = is_kept & (tl.load(mask + tokens, mask=is_kept, other=0) != 0)
    logp = tl.load(logprobs + tokens, mask=is_kept, other=0.0)
    ent = tl.load(entropy + tokens, mask=is_kept, other=0.0)
    advantage = tl.load(advantages + tokens, mask=is_kept, other=0.0)
    scale = tl.load(inverse_normaliser)
    if weights is not None:
        scale = scale * tl.load(weights + tokens, mask=is_kept, other=0.0)
    old = logp
    if old_logprobs is not None:
        old = tl.load(old_logprobs + tokens, mask=is_kept, other=0.0)
    # Log-ratios: policy to old policy, old policy to rollout policy, and policy to reference policy.
    token_log_ratio = tl.zeros_like(logp)
    if log_ratio is not None:
        token_log_ratio = tl.load(log_ratio + tokens, mask=is_kept, other=0.0)
    elif old_logprobs is not None:
        token_log_ratio = logp - old
    token_log_drift = tl.zeros_like(logp)
    if log_drift is not None:
        token_log_drift = tl.load(log_drift + tokens, mask=is_kept, other=0.0)
    elif CORRECTION != "none":
        token_log_drift = old - tl.load(rollout_logprobs + tokens, mask=is_kept, other=0.0)
    token_log_reference = tl.zeros_like(logp)
    token_log_importance = tl.zeros_like(logp)  # log-ratio of the policy to the rollout policy
    kl = tl.zeros_like(logp)
    kl_slope = tl.zeros_like(logp)
    if KL != "none":
        token_log_reference = logp - tl.load(reference_logprobs + tokens, mask=is_kept, other=0.0)
        if rollout_logprobs is not None:
            token_log_importance = logp - tl.load(rollout_logprobs + tokens, mask=is_kept, other=0.0)
        elif old_logprobs is not None:
            token_log_importance = logp - old
        importance = exact_exp(clamped(token_log_importance))
        if CORRECTION == "tis":
            importance = tl.where(importance > correction_high, correction_high, importance)
        kl = importance * divergence(token_log_reference, KL)
        kl_slope = importance * token_log_reference  # score-function gradient, the same for k1, k2 and k3

    # A drift or log-prob that is not finite masks nothing, and makes the loss NaN below.
    is_masked = tl.zeros(logp.shape, tl.int1)
    if dropped is not None:
        is_masked = tl.load(dropped + tokens, mask=is_kept, other=0) != 0
    if gate is not None:
        is_gated = tl.load(gate + tokens, mask=is_kept, other=0) != 0
        is_masked = is_masked | (is_gated & (exact_exp(logp) >= mpt_probability) & is_finite(logp))
    drift = exact_exp(clamped(token_log_drift))
    if (CORRECTION == "icepop") | (CORRECTION == "sequence_mask"):
        is_masked = is_masked | (((drift < correction_low) | (drift > correction_high)) & is_finite(token_log_drift))
    weight = tl.full(logp.shape, 1.0, tl.float32)
    if CORRECTION == "tis":
        weight = tl.where(drift > correction_high, correction_high, drift)

    surrogate, slope, is_clipped = clipped_surrogate(
        token_log_ratio, advantage, logp, clip_low, clip_high, dual_clip, KIND, HAS_DUAL_CLIP
    )
    values_read = (
        logp + token_log_ratio + token_log_drift + token_log_reference + token_log_importance + advantage + scale
    )
    bonus = tl.zeros_like(logp)
    if HAS_ENTROPY:
        bonus = entropy_coef * ent
        values_read += ent
    scale = tl.where(is_finite(values_read), scale, float("nan"))
    loss = (-weight * surrogate + (kl_coef * kl).to(tl.float64) - bonus.to(tl.float64)) * scale
    loss = tl.where(is_masked, 0.0, loss)
    c = tl.where(is_masked, 0.0, (-weight * slope + kl_coef * kl_slope) * scale)
    tl.store(coefficient + tokens, c, mask=is_kept)
    if HAS_ENTROPY:
        e = tl.where(is_masked, 0.0, tl.zeros_like(logp) - entropy_coef * scale)
        tl.store(entropy_coefficient + tokens, e, mask=is_kept)

    is_clamped = (tl.abs(token_log_ratio) > LOG_RATIO_BOUND) | (tl.abs(token_log_drift) > LOG_RATIO_BOUND)
    is_clamped = is_clamped | (tl.abs(token_log_importance) > LOG_RATIO_BOUND)
    if KL == "k3":
        is_clamped = is_clamped | (tl.abs(token_log_reference) > LOG_RATIO_BOUND)
    agent = tl.zeros_like(tokens)
    if agent_of is not None:
        agent = tl.load(agent_of + tokens, mask=is_kept, other=0)
    at = sums + tl.program_id(0).to(tl.int64) * num_agents * NUM_SUMS
    put_agent_sums(
        at, num_agents, agent, is_kept, loss, is_clipped & ~is_masked, is_masked, is_clamped & ~is_masked, ent, kl
    )


@triton.jit(do_not_specialize=VARYING)
def list_active(
    num_rows,
    ids,
    first,
    coefficient,
    entropy_coefficient,
    place_of,  # [num_rows] int32: the row's index among active rows; -1 = not active
    active,  # [>= num_rows] int64: receives the tokens of the active rows, in order
    count,  # [1] int32
    BLOCK: tl.constexpr,
):
    """List the active rows.

    Grid (1,): a chunk has few rows, and a single program needs no second pass to add up counts.
    """
    base = tl.zeros((), tl.int32)
    for begin in range(0, num_rows, BLOCK):
        rows = begin + tl.arange(0, BLOCK)
        is_row = rows < num_rows
        tokens = token_of(ids, first, tl.where(is_row, rows, 0).to(tl.int64))
        c = tl.load(coefficient + tokens, mask=is_row, other=0.0)
        e = tl.load(entropy_coefficient + tokens, mask=is_row, other=0.0)
        is_active = (c != 0.0) | (e != 0.0)
        position = base + tl.cumsum(is_active.to(tl.int32), axis=0) - 1
        tl.store(place_of + rows, tl.where(is_active, position, -1), mask=is_row)
        tl.store(active + position, tokens, mask=is_active)
        base += tl.sum(is_active.to(tl.int32), axis=0)
    tl.store(count, base)


@triton.jit(do_not_specialize=VARYING)
def row_gradients(
    logits,
    stride,
    columns,
    ids,
    first,
    targets,
    first_column,
    inverse_temperature,
    inverse_of_all,
    slopes,  # [T] arrays of Slopes
    place_of,  # [num_rows] int32, from list_active
    out,  # [.., out_stride] in the GEMM's dtype; padding columns receive 0
    out_stride,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write dz of the active rows to `out`, at the indices place_of. Grid (num_rows, pieces)."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(place_of + row).to(tl.int64)
    if position >= 0:
        token = token_of(ids, first, row)
        inverse = inverse_of_all
        if inverse_temperature is not None:
            inverse = tl.load(inverse_temperature + token)
        logprobs, entropies, maxima, log_sums, coefficient, entropy_coefficient = slopes
        maximum, log_sum, ent = tl.load(maxima + token), tl.load(log_sums + token), tl.load(entropies + token)
        c, e = tl.load(coefficient + token), tl.load(entropy_coefficient + token)
        # 1 - p of the target through expm1: p is close to 1 in a trained model, where 1 - p would round to 0.
        target_logp = tl.load(logprobs + token)
        bounded = tl.where(target_logp < NOTHING, NOTHING, target_logp)  # where p = 0, 0 times -inf would be NaN
        at_target = (-c * exact_expm1(target_logp) - e * exact_exp(target_logp) * (bounded + ent)) * inverse
        target = tl.load(targets + token) - first_column
        begin = tl.program_id(1) * PIECE
        stop = tl.minimum(begin + PIECE, stride)
        out_stop = tl.minimum(begin + PIECE, out_stride)
        lanes = tl.arange(0, BLOCK)
        for offset in range(begin, out_stop, BLOCK):
            column = offset + lanes
            x = tl.load(logits + row * stride + column, mask=column < stop, other=0.0)
            logp = (x - maximum) * inverse - log_sum
            logp = tl.where(logp < NOTHING, NOTHING, logp)  # where p = 0, 0 times -inf would be NaN
            dz = -tl.exp(logp) * (c + e * (logp + ent)) * inverse
            dz = tl.where(column == target, at_target, dz)
            dz = tl.where(column < columns, dz, 0.0)
            tl.store(out + position * out_stride + column, dz.to(out.dtype.element_ty), mask=column < out_stop)
