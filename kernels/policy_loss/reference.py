"""The policy objective in plain PyTorch: the definition that every other implementation is judged against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from marsrl.kernels.head.objective import METRICS, PolicyLoss, PolicyTokens


@dataclass(frozen=True)
class Terms:
    """One element a trained token: its loss (differentiable), KL, whether the clip is active, whether it is masked."""

    loss: Tensor
    kl: Tensor
    is_clipped: Tensor
    is_masked: Tensor


def sequence_means(values: Tensor, sequence_of: Tensor, num_sequences: int) -> Tensor:
    """[S] the mean over the values [n] of each sequence, 0 where it has none; sequence_of [n] int64."""
    total = values.new_zeros(num_sequences).index_add_(0, sequence_of, values)
    count = values.new_zeros(num_sequences).index_add_(0, sequence_of, torch.ones_like(values))
    return total / count.clamp(min=1)


def policy_terms(logp: Tensor, entropy: Tensor, tokens: PolicyTokens, kept: Tensor) -> Terms:
    """The objective at the tokens kept [n]; logp, entropy [n] belong to these, in any float dtype."""
    dtype, objective = logp.dtype, tokens.objective

    def of_kept(values: Tensor | None) -> Tensor:
        assert values is not None  # the op checked what the objective needs
        return values[kept].to(dtype)

    def mean(values: Tensor) -> Tensor:
        sequence_of = tokens.sequence_of[kept]
        return sequence_means(values, sequence_of, tokens.cu_seqlens.numel() - 1)[sequence_of]

    advantages = of_kept(tokens.advantages)
    old = logp.detach() if tokens.old_logprobs is None else of_kept(tokens.old_logprobs)
    log_ratio = logp - old
    if objective.ratio == "sequence":
        log_ratio = mean(log_ratio.detach()) + logp - logp.detach()
    ratio, low, high = log_ratio.exp(), 1 - objective.clip_low, 1 + objective.clip_high
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

    is_masked = torch.zeros_like(logp, dtype=torch.bool)
    if tokens.gate is not None and objective.mpt_probability is not None:
        is_masked = tokens.gate[kept] & (logp.detach().exp() >= objective.mpt_probability)
    if tokens.dropped is not None:
        is_masked = is_masked | tokens.dropped[kept]
    if objective.correction != "none":
        log_drift = old - of_kept(tokens.rollout_logprobs)
        if objective.correction == "tis":
            surrogate = log_drift.exp().clamp(max=objective.correction_high) * surrogate
        else:
            drift = (log_drift if objective.correction == "icepop" else mean(log_drift)).exp()
            is_masked = is_masked | ~((drift >= objective.correction_low) & (drift <= objective.correction_high))

    kl = torch.zeros_like(logp)
    if objective.kl != "none":
        x = logp - of_kept(tokens.reference_logprobs)
        kl = x if objective.kl == "k1" else x * x / 2 if objective.kl == "k2" else torch.expm1(-x) + x

    loss = -surrogate + objective.kl_coef * kl - objective.entropy_coef * entropy
    loss = torch.where(is_masked, torch.zeros_like(loss), loss) / tokens.normaliser
    if tokens.weights is not None:
        loss = loss * of_kept(tokens.weights)
    return Terms(loss, kl, is_clipped & ~is_masked, is_masked)


def policy_loss_reference(logprobs: Tensor, entropy: Tensor, tokens: PolicyTokens) -> PolicyLoss:
    """PolicyLoss whose loss autograd differentiates through logprobs and entropy [T]."""
    kept = torch.arange(logprobs.numel(), device=logprobs.device)
    if tokens.mask is not None:
        kept = tokens.mask.nonzero()[:, 0]
    logp, ent = logprobs[kept], entropy[kept]
    terms = policy_terms(logp, ent, tokens, kept)
    with torch.enable_grad():
        leaf = logp.detach().requires_grad_()
        (slope,) = torch.autograd.grad(policy_terms(leaf, ent.detach(), tokens, kept).loss.sum(), leaf)

    agent_of = torch.zeros_like(kept) if tokens.agent_of is None else tokens.agent_of[kept]
    values = (terms.loss, terms.is_clipped, terms.is_masked, ent, terms.kl, torch.ones_like(ent))
    sums = {
        name: logp.new_zeros(tokens.num_agents).index_add_(0, agent_of, value.detach().to(logp.dtype))
        for name, value in zip(METRICS, values)
    }

    def to_all(values: Tensor) -> Tensor:
        return torch.zeros_like(logprobs).detach().index_copy_(0, kept, values.detach())

    return PolicyLoss(terms.loss.sum(), to_all(logp), to_all(ent), to_all(slope), sums)
