"""The fused loss in plain PyTorch: full logits, then the objective, all by autograd. The definition."""

from torch import Tensor

from marsrl.kernels.head.objective import PolicyLoss, PolicyTokens
from marsrl.kernels.head.support import Support
from marsrl.kernels.linear_logprob.reference import linear_logprob_reference
from marsrl.kernels.policy_loss.reference import policy_loss_reference


def linear_policy_loss_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    num_columns: int,
    tokens: PolicyTokens,
    support: Support | None = None,
) -> PolicyLoss:
    """PolicyLoss whose loss autograd differentiates through hidden [T, H] and weight [V, H]."""
    if tokens.mask is None:
        logprobs, entropy = linear_logprob_reference(hidden, weight, targets, temperature, num_columns, support)
    else:
        kept = tokens.mask.nonzero()[:, 0]
        of_kept = temperature[kept] if isinstance(temperature, Tensor) else temperature
        drawn_from = None if support is None else support.take(kept)
        logp, ent = linear_logprob_reference(hidden[kept], weight, targets[kept], of_kept, num_columns, drawn_from)
        logprobs = logp.new_zeros(hidden.shape[0]).index_copy(0, kept, logp)
        entropy = ent.new_zeros(hidden.shape[0]).index_copy(0, kept, ent)
    return policy_loss_reference(logprobs, entropy, tokens)
