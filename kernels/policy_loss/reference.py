"""Reference definition of the policy objective, against which all other implementations are tested."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.head.objective import LOG_RATIO_BOUND, METRICS, PolicyLoss, PolicyTokens


@dataclass(frozen=True)
class Terms:
    """Results of the objective for each trained token.

    loss is differentiable; kl is the KL estimate times the token's importance.
    """

    loss: Tensor
    kl: Tensor
    is_clipped: Tensor
    is_masked: Tensor
    is_clamped: Tensor


def sequence_means(values: Tensor, sequence_of: Tensor, num_sequences: int) -> Tensor:
    """Return the mean of each sequence's values, [S]; 0 for a sequence without values.

    values: [n]. sequence_of: [n] int64, the sequence of each value.
    """
    total = values.new_zeros(num_sequences).index_add_(0, sequence_of, values)
    count = values.new_zeros(num_sequences).index_add_(0, sequence_of, torch.ones_like(values))
    return total / count.clamp(min=1)


def policy_terms(logp: Tensor, entropy: Tensor, tokens: PolicyTokens, kept: Tensor) -> Terms:
    """Evaluate the objective at the tokens `kept`, [n] int64.

    logp, entropy: [n] in any float dtype, the values of these tokens.

    Values of masked tokens are replaced before any computation, because NaN times a gradient of 0 would be NaN.
    """
    dtype, objective = logp.dtype, tokens.objective

    def of_kept(values: Tensor | None) -> Tensor:
        assert values is not None  # the op checked what the objective needs
        return values[kept].to(dtype)

    def mean(values: Tensor) -> Tensor:
        sequence_of = tokens.sequence_of[kept]
        return sequence_means(values, sequence_of, tokens.cu_seqlens.numel() - 1)[sequence_of]

    zeros = torch.zeros_like(logp)
    current = logp.detach()
    old = current if tokens.old_logprobs is None else of_kept(tokens.old_logprobs)
    log_ratio, log_drift, log_reference, log_importance = current - old, zeros, zeros, zeros
    if tokens.old_logprobs is None:
        log_ratio = zeros
    elif objective.ratio == "sequence":
        log_ratio = mean(log_ratio)
    if objective.correction != "none":
        log_drift = old - of_kept(tokens.rollout_logprobs)
        if objective.correction == "sequence_mask":
            log_drift = mean(log_drift)
    if objective.kl != "none":
        log_reference = current - of_kept(tokens.reference_logprobs)
        log_importance = current - (old if tokens.rollout_logprobs is None else of_kept(tokens.rollout_logprobs))

    drift, importance = _clamped(log_drift).exp(), _clamped(log_importance).exp()
    if objective.correction == "tis":
        importance = importance.clamp(max=objective.correction_high)
    is_masked = torch.zeros_like(logp, dtype=torch.bool)
    if tokens.gate is not None and objective.mpt_probability is not None:
        is_masked = tokens.gate[kept] & (current.exp() >= objective.mpt_probability) & current.isfinite()
    if tokens.dropped is not None:
        is_masked = is_masked | tokens.dropped[kept]
    if objective.correction in ("icepop", "sequence_mask"):
        is_far = (drift < objective.correction_low) | (drift > objective.correction_high)
        is_masked = is_masked | (is_far & log_drift.isfinite())

    def read(values: Tensor) -> Tensor:
        return torch.where(is_masked, zeros, values)

    # `read` replaces values of masked tokens by 0, so a NaN or infinity below comes from a token that counts.
    kl = importance * _divergence(log_reference, objective.kl)  # the metric "kl" includes masked tokens
    moved = read(logp) - read(current)  # 0, but with the gradient of logp
    logp, advantages = read(logp), read(of_kept(tokens.advantages))
    log_ratio, drift = read(log_ratio), read(drift)
    log_reference, log_importance, importance = read(log_reference), read(log_importance), read(importance)
    bonus = torch.where(is_masked | (objective.entropy_coef == 0), zeros, entropy)
    scale = read(torch.ones_like(logp) if tokens.weights is None else of_kept(tokens.weights)) / tokens.normaliser
    logs = log_ratio + read(log_drift) + log_reference + log_importance
    total = logp.detach() + advantages + logs + bonus.detach() + scale
    scale = torch.where(total.isfinite(), scale, torch.nan)

    ratio, low, high = _clamped(log_ratio + moved).exp(), 1 - objective.clip_low, 1 + objective.clip_high
    if objective.kind == "cispo":
        surrogate = ratio.detach().clamp(low, high) * advantages * logp
        is_clipped = (ratio < low) | (ratio > high)
    else:
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        is_clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
        if objective.dual_clip is not None:
            surrogate = torch.where(
                advantages < 0, torch.maximum(surrogate, objective.dual_clip * advantages), surrogate
            )
            is_clipped = is_clipped | ((advantages < 0) & (ratio > objective.dual_clip))
    if objective.correction == "tis":
        surrogate = drift.clamp(max=objective.correction_high) * surrogate
    penalty = objective.kl_coef * (read(kl) + importance * log_reference * moved)  # score-function gradient

    loss = (-surrogate + penalty - objective.entropy_coef * bonus) * scale
    loss = loss + moved * (scale - scale)  # NaN in scale reaches the gradient of a clipped token too
    clamped = [log_ratio, read(log_drift), log_importance] + [log_reference] * (objective.kl == "k3")
    is_clamped = torch.stack([log.abs() > LOG_RATIO_BOUND for log in clamped]).any(0)
    return Terms(loss, kl, is_clipped, is_masked, is_clamped)


def _clamped(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _divergence(x: Tensor, kl: str) -> Tensor:
    """Estimate KL(policy || reference) from x = log p - log p of the reference."""
    if kl == "none":
        return torch.zeros_like(x)
    if kl == "k3":
        x = _clamped(x)
        return torch.expm1(-x) + x
    return x if kl == "k1" else x * x / 2


def policy_loss_reference(logprobs: Tensor, entropy: Tensor, tokens: PolicyTokens) -> PolicyLoss:
    """Return PolicyLoss, whose loss is differentiable with respect to logprobs and entropy [T]."""
    token_ids = torch.arange(logprobs.numel(), device=logprobs.device)
    if tokens.mask is not None:
        token_ids = tokens.mask.nonzero()[:, 0]
    logp, ent = logprobs[token_ids], entropy[token_ids]
    terms = policy_terms(logp, ent, tokens, token_ids)
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        (slope,) = torch.autograd.grad(policy_terms(leaf, ent.detach(), tokens, token_ids).loss.sum(), leaf)

    agent_of = torch.zeros_like(token_ids) if tokens.agent_of is None else tokens.agent_of[token_ids]
    values = (terms.loss, terms.is_clipped, terms.is_masked, terms.is_clamped, ent, terms.kl, torch.ones_like(ent))
    sums = {
        name: logp.new_zeros(tokens.num_agents).index_add_(0, agent_of, value.detach().to(logp.dtype))
        for name, value in zip(METRICS, values, strict=True)
    }

    def to_all(values: Tensor) -> Tensor:
        return torch.zeros_like(logprobs).detach().index_copy_(0, token_ids, values.detach())

    return PolicyLoss(terms.loss.sum(), to_all(logp), to_all(ent), to_all(slope), sums)
