"""Marks of the tokens that a policy loss clips and masks, for display."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marsrl.kernels.head.objective import LossInputs
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.reference import policy_terms


@dataclass(frozen=True)
class TokenMarks:
    """Marks of tokens, each [T] bool, False where the mask is off.

    clipped: the clip is active, as counted in PolicyLoss.agent_sums.
    gated: the token is dropped, or masked by the gate.
    masked: the token is gated, or masked by a correction, and adds nothing to the loss.
    """

    clipped: Tensor
    gated: Tensor
    masked: Tensor


@torch.no_grad()
def token_marks(logprobs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenMarks:
    """Compute which tokens the loss clips and masks, from logprobs and entropy [T].

    The results have no gradient. For a ratio at a clip bound, a row kernel may count differently, because it rounds differently.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    tokens = policy_tokens("token_marks", logprobs.shape[0], logprobs.device, inputs)
    token_ids = torch.arange(logprobs.numel(), device=logprobs.device)
    if tokens.mask is not None:
        token_ids = tokens.mask.nonzero()[:, 0]
    logp, ent = logprobs.detach().float()[token_ids], entropy.detach().float()[token_ids]
    terms = policy_terms(logp, ent, tokens, token_ids)
    by_gate = replace(tokens, objective=replace(tokens.objective, correction="none"))

    def to_all(flags: Tensor) -> Tensor:
        return torch.zeros(logprobs.numel(), dtype=torch.bool, device=logprobs.device).index_copy_(0, token_ids, flags)

    gated = policy_terms(logp, ent, by_gate, token_ids).is_masked
    return TokenMarks(to_all(terms.is_clipped), to_all(gated), to_all(terms.is_masked))
