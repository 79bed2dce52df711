"""The fused loss: logits, statistics, coefficients and gradient of one chunk after the other, whoever computes a row."""

import logging
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from marsrl.kernels.head.chunked_head import head_gradients, head_statistics, policy_gradients
from marsrl.kernels.head.gradients import HeadGradients, Wanted
from marsrl.kernels.head.objective import PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms, RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import Head
from marsrl.kernels.policy_loss.terms import needs_whole_sequences, policy_terms


@dataclass(frozen=True)
class FusedLoss:
    """A loss with its gradients already formed; gradients is None where none is wanted."""

    statistics: Statistics
    terms: PolicyTerms
    gradients: HeadGradients | None


def fused_loss(
    kernels: RowKernels,
    head: Head,
    hidden: Tensor,
    tokens: PolicyTokens,
    wanted: Wanted,
    compacts: bool = True,
) -> FusedLoss:
    """Loss, and gradients for a grad_output of 1 where they are wanted; takes the route that the objective allows.

    Masked rows never enter the first GEMM, rows without a coefficient never enter the backward GEMMs: with mask share m
    and active share a it is (2m + 4a) THV FLOPs, and (2m + 6a) THV on the route of whole sequences. Where not
    compacts a device computes all rows, 6 or 8 THV, and the host does not wait for it.
    """
    compacts = compacts or kernels.is_host
    rows = Rows.of(tokens.mask if compacts else None, hidden.shape[0], is_late=not kernels.is_host)
    has_entropy = tokens.objective.entropy_coef != 0
    if not needs_whole_sequences(tokens):
        statistics = Statistics.zeros(hidden.shape[0], hidden.device)
        terms = policy_terms(kernels, tokens, statistics.logprobs, statistics.entropy)
        gradients = policy_gradients(kernels, head, hidden, rows, statistics, terms, wanted, compacts, has_entropy)
        return FusedLoss(statistics, terms, gradients)
    _say_recompute(tokens.objective.ratio, tokens.objective.correction)
    statistics = head_statistics(kernels, head, hidden, rows)
    terms = policy_terms(kernels, tokens, statistics.logprobs, statistics.entropy)
    terms.evaluate(rows.settled())
    if not wanted.any:
        return FusedLoss(statistics, terms, None)
    slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient, has_entropy)
    return FusedLoss(statistics, terms, head_gradients(kernels, head, hidden, slopes, wanted, compacts))


@cache
def _say_recompute(ratio: str, correction: str) -> None:
    logging.getLogger(__name__).info(
        "linear_policy_loss: ratio=%s, correction=%s need the log-probs of whole sequences first; "
        "the logits of rows with a coefficient are computed twice",
        ratio,
        correction,
    )
