"""From the arguments of a policy loss to the inputs of its row kernel."""

import torch
from torch import Tensor

from marsrl.kernels.head.objective import METRICS, PolicyObjective, PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, TermInputs
from marsrl.kernels.sequence_sums import sequence_sums


def needs_whole_sequences(objective: PolicyObjective, tokens: PolicyTokens) -> bool:
    """True where a token's coefficient depends on current log-probs of other tokens of its sequence."""
    if tokens.old_logprobs is None:
        return objective.correction == "sequence_mask"
    return objective.ratio == "sequence"


def policy_terms(
    kernels: RowKernels, objective: PolicyObjective, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor
) -> PolicyTerms:
    """An evaluator of the objective.

    logprobs, entropy: [T] float32, contiguous; read when `evaluate` names a token. Where needs_whole_sequences holds
    they must be complete before this is called.
    """
    log_ratio, dropped = _of_whole_sequences(objective, tokens, logprobs)
    return kernels.policy_terms(
        TermInputs(
            objective=objective,
            num_agents=tokens.num_agents,
            advantages=_float32(tokens.advantages),
            log_ratio=log_ratio,
            old_logprobs=_float32_or_none(tokens.old_logprobs),
            rollout_logprobs=_float32_or_none(tokens.rollout_logprobs),
            reference_logprobs=_float32_or_none(tokens.reference_logprobs),
            gate=None if tokens.gate is None else tokens.gate.contiguous(),
            dropped=None if dropped is None else dropped.contiguous(),
            mask=None if tokens.mask is None else tokens.mask.contiguous(),
            agent_of=None if tokens.agent_of is None else tokens.agent_of.long().contiguous(),
            logprobs=logprobs,
            entropy=entropy,
            normaliser=tokens.normaliser,
            weights=_float32_or_none(tokens.weights),
        )
    )


def agent_sums(sums: Tensor) -> dict[str, Tensor]:
    """{metric: [A] float32} of PolicyTerms.sums [A, 6]."""
    return dict(zip(METRICS, sums.t().float()))


def total_loss(sums: Tensor) -> Tensor:
    """[] float32: the loss of all agents together, from PolicyTerms.sums [A, 6]."""
    return sums[:, 0].sum().float()


def _float32(values: Tensor) -> Tensor:
    return values.detach().float().contiguous()


def _float32_or_none(values: Tensor | None) -> Tensor | None:
    return None if values is None else _float32(values)


def _sequence_means(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[S] float32: of each sequence the mean of values [T] over its tokens of the mask; 0 without any."""
    total, count = sequence_sums(_float32(values), tokens.mask, tokens.cu_seqlens)
    return (total / count.clamp(min=1)).float()


def _of_whole_sequences(
    objective: PolicyObjective, tokens: PolicyTokens, logprobs: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(log_ratio [T] float32 | None, dropped [T] bool | None): what depends on a sequence as a whole."""
    log_ratio, dropped = None, tokens.dropped
    if objective.ratio == "sequence" and tokens.old_logprobs is not None:
        log_ratio = _sequence_means(logprobs - tokens.old_logprobs, tokens).index_select(0, tokens.sequence_of)
    if objective.correction == "sequence_mask":
        assert tokens.rollout_logprobs is not None
        trainer = logprobs if tokens.old_logprobs is None else tokens.old_logprobs
        drift = _sequence_means(trainer - tokens.rollout_logprobs, tokens).exp()
        keeps = (drift >= objective.correction_low) & (drift <= objective.correction_high)
        leaves = torch.logical_not(keeps).index_select(0, tokens.sequence_of)
        dropped = leaves if dropped is None else leaves | dropped
    return log_ratio, dropped
