"""Reference definition of the fused loss: all logits, then the objective, differentiated by autograd."""

import torch
from torch import Tensor

from marsrl.kernels.differentiable import Gradient
from marsrl.kernels.head.objective import PolicyLoss, PolicyTokens
from marsrl.kernels.head.support import Support
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference
from marsrl.kernels.policy_loss.reference import policy_loss_reference, policy_terms

# A single autograd node keeps the caller's autocast out of the backward's products, too.
_logprobs = Gradient("linear_policy_loss", num_tensors=2, num_outputs=2).reference(linear_logprob_reference).run


def linear_policy_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    num_columns: int,
    tokens: PolicyTokens,
    support: Support | None = None,
) -> PolicyLoss:
    """Return PolicyLoss, whose loss is differentiable with respect to hidden [T, H] and weight [V, H]."""

    def statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
        of_rows = temperature[rows] if isinstance(temperature, Tensor) else temperature
        drawn_from = None if support is None else support.take(rows)
        results: tuple[Tensor, Tensor] = _logprobs(
            hidden[rows], weight, targets[rows], of_rows, num_columns, drawn_from
        )
        return results

    token_ids = torch.arange(hidden.shape[0], device=hidden.device)
    if tokens.mask is not None:
        token_ids = tokens.mask.nonzero()[:, 0]
    # Leave tokens out of the graph if they are masked regardless of their log-prob: a NaN row times a gradient of 0 is NaN.
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    unknown = torch.full(token_ids.shape, torch.nan, dtype=dtype, device=hidden.device)
    is_masked = policy_terms(unknown, unknown, tokens, token_ids).is_masked
    with torch.no_grad():
        logp, ent = statistics(token_ids[is_masked])
        logprobs = logp.new_zeros(hidden.shape[0]).index_copy(0, token_ids[is_masked], logp)
        entropy = ent.new_zeros(hidden.shape[0]).index_copy(0, token_ids[is_masked], ent)
    logp, ent = statistics(token_ids[~is_masked])
    logprobs, entropy = (
        logprobs.index_copy(0, token_ids[~is_masked], logp),
        entropy.index_copy(0, token_ids[~is_masked], ent),
    )
    return policy_loss_reference(logprobs, entropy, tokens)
