"""The fused loss on the CPU: logits, statistics, coefficients and gradient of one chunk after the other."""

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..linear_logprob.cpu import sweep_gradients, sweep_statistics
from ..objective import PolicyObjective, PolicyTokens
from ..policy_loss.cpu import PolicyTermsOnCpu, needs_whole_sequences
from ..vocabulary import Head, HeadGradients, Rows, Statistics


@dataclass(frozen=True)
class FusedLoss:
    """A loss with its gradients already formed."""

    statistics: Statistics
    terms: PolicyTermsOnCpu
    gradients: HeadGradients


def fused_loss(
    head: Head,
    hidden: Tensor,
    objective: PolicyObjective,
    tokens: PolicyTokens,
    wants_hidden: bool,
    wants_weight: bool,
) -> FusedLoss:
    """Loss, and gradients for a grad_output of 1 where they are wanted; takes the route that the objective allows.

    Masked rows never enter the first GEMM, rows without a coefficient never enter the backward GEMMs: with mask share m
    and active share a it is (2m + 4a) THV FLOPs, and (2m + 6a) THV on the route of whole sequences.
    """
    rows = Rows.of(tokens.mask, hidden.shape[0])
    if needs_whole_sequences(objective, tokens):
        _say_recompute(objective.ratio, objective.correction)
        statistics = sweep_statistics(head, hidden, rows)
        terms = PolicyTermsOnCpu(objective, tokens, statistics.logprobs, statistics.entropy, rows.ids)
        terms.evaluate(rows.ids, rows.first, rows.count)
        if not (wants_hidden or wants_weight):
            return FusedLoss(statistics, terms, HeadGradients(head, hidden, False, False))
        gradients = sweep_gradients(
            head, hidden, statistics, terms.coefficient, terms.entropy_coefficient, wants_hidden, wants_weight
        )
        return FusedLoss(statistics, terms, gradients)
    return _single_pass(head, hidden, objective, tokens, rows, wants_hidden, wants_weight)


def _single_pass(
    head: Head,
    hidden: Tensor,
    objective: PolicyObjective,
    tokens: PolicyTokens,
    rows: Rows,
    wants_hidden: bool,
    wants_weight: bool,
) -> FusedLoss:
    statistics = Statistics.zeros(hidden.shape[0])
    terms = PolicyTermsOnCpu(objective, tokens, statistics.logprobs, statistics.entropy, rows.ids)
    gradients = HeadGradients(head, hidden, wants_hidden, wants_weight)
    wants_any = wants_hidden or wants_weight
    size = min(head.chunk_rows, rows.count)
    buffer = torch.empty(size, head.width)  # its first `filled` rows wait for the backward GEMMs
    active = torch.empty(size, dtype=torch.int64)  # the tokens of these rows
    filled = 0
    for chunk in rows.chunks(head.chunk_rows):
        if filled + chunk.count > size:
            gradients.add(buffer[:filled], active[:filled])
            filled = 0
        logits = buffer[filled : filled + chunk.count]
        head.logits(chunk.take(hidden), logits)
        head.statistics(logits, chunk, statistics)
        terms.evaluate(chunk.ids, chunk.first, chunk.count)
        if wants_any:
            filled += head.gradients_(
                logits, chunk, statistics, terms.coefficient, terms.entropy_coefficient, active[filled:]
            )
    gradients.add(buffer[:filled], active[:filled])
    return FusedLoss(statistics, terms, gradients)


@cache
def _say_recompute(ratio: str, correction: str) -> None:
    logging.getLogger(__name__).info(
        "linear_policy_loss: ratio=%s, correction=%s need the log-probs of whole sequences first; "
        "the logits of rows with a coefficient are computed twice",
        ratio,
        correction,
    )
