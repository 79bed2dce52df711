"""Conversion of a policy loss's arguments to the inputs of its row kernel."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.head.objective import METRICS, PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels
from marsrl.kernels.sequence_sums import sequence_sums


def needs_whole_sequences(tokens: PolicyTokens) -> bool:
    """Return True if a token's coefficient depends on the log-probs of its whole sequence."""
    if tokens.old_logprobs is None:
        return tokens.objective.correction == "sequence_mask"
    return tokens.objective.ratio == "sequence"


def policy_terms(kernels: RowKernels, tokens: PolicyTokens, logprobs: Tensor, entropy: Tensor) -> PolicyTerms:
    """Create the evaluator of the objective for these tokens.

    logprobs, entropy: [T] float32, contiguous. A token's elements are read when it is evaluated, so they may be set until then.
    If needs_whole_sequences is True, all elements must be set before this call.
    """
    log_ratio, log_drift = _of_whole_sequences(tokens, logprobs)
    prepared: dict[str, Any] = {
        "advantages": _float32(tokens.advantages),
        "log_ratio": log_ratio,
        "log_drift": log_drift,
        "old_logprobs": _float32(tokens.old_logprobs),
        "rollout_logprobs": _float32(tokens.rollout_logprobs),
        "reference_logprobs": _float32(tokens.reference_logprobs),
        "gate": _contiguous(tokens.gate),
        "dropped": _contiguous(tokens.dropped),
        "mask": _contiguous(tokens.mask),
        "weights": _float32(tokens.weights),
    }
    changed = {name: values for name, values in prepared.items() if values is not getattr(tokens, name)}
    return kernels.policy_terms(replace(tokens, **changed) if changed else tokens, logprobs, entropy)


def agent_sums(sums: Tensor) -> dict[str, Tensor]:
    """Return PolicyTerms.sums as {metric: [A] float32}."""
    return dict(zip(METRICS, sums.float().unbind(1)))


def total_loss(sums: Tensor) -> Tensor:
    """Return the loss of all agents together, [] float32, from PolicyTerms.sums."""
    return sums[:, 0].sum().float()


def as_read(values: Tensor) -> Tensor:
    """Return the values as row kernels read them: contiguous float32, detached.

    A tensor that already has this form is returned as it is.
    """
    if values.dtype == torch.float32 and not values.requires_grad and values.is_contiguous():
        return values
    return values.detach().float().contiguous()


def _float32(values: Tensor | None) -> Tensor | None:
    return None if values is None else as_read(values)


def _contiguous(flags: Tensor | None) -> Tensor | None:
    return None if flags is None else flags.contiguous()


def _of_whole_sequences(tokens: PolicyTokens, logprobs: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return (log_ratio, log_drift), each [T] float32: means over the token's sequence.

    A result is None if the objective uses the token's own value.
    """
    objective, log_ratio, log_drift = tokens.objective, None, None

    def means(values: Tensor) -> Tensor:
        total, count = sequence_sums(values.detach().float(), tokens.mask, tokens.cu_seqlens)
        return (total / count.clamp(min=1)).float().index_select(0, tokens.sequence_of)

    if objective.ratio == "sequence" and tokens.old_logprobs is not None:
        log_ratio = means(logprobs - tokens.old_logprobs)
    if objective.correction == "sequence_mask":
        assert tokens.rollout_logprobs is not None
        log_drift = means((logprobs if tokens.old_logprobs is None else tokens.old_logprobs) - tokens.rollout_logprobs)
    return log_ratio, log_drift
