"""token_marks: which tokens a policy loss clips and masks, for display."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marsrl.kernels.head.objective import LossInputs
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.reference import policy_terms


@dataclass(frozen=True)
class TokenMarks:
    """[T] bool each, False where the mask is off.

    clipped: the clip is active, as PolicyLoss counts it. gated: masked as well mastered (gate, dropped). masked: by these or by a
    correction, so that the token lost every term.
    """

    clipped: Tensor
    gated: Tensor
    masked: Tensor


@torch.no_grad()
def token_marks(logprobs: Tensor, entropy: Tensor, inputs: LossInputs) -> TokenMarks:
    """Clip and masks that the loss applies to each token, from its logprobs and entropy [T].

    Elementwise, in plain PyTorch: nothing of the size of the vocabulary, no gradient. At a bound of the clip itself a row kernel
    may round to the other side.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    tokens = policy_tokens("token_marks", logprobs.shape[0], logprobs.device, inputs)
    kept = torch.arange(logprobs.numel(), device=logprobs.device)
    if tokens.mask is not None:
        kept = tokens.mask.nonzero()[:, 0]
    logp, ent = logprobs.detach().float()[kept], entropy.detach().float()[kept]
    terms = policy_terms(logp, ent, tokens, kept)
    by_gate = replace(tokens, objective=replace(tokens.objective, correction="none"))

    def to_all(flags: Tensor) -> Tensor:
        return torch.zeros(logprobs.numel(), dtype=torch.bool, device=logprobs.device).index_copy_(0, kept, flags)

    gated = policy_terms(logp, ent, by_gate, kept).is_masked
    return TokenMarks(to_all(terms.is_clipped), to_all(gated), to_all(terms.is_masked))
