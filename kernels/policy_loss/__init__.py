"""RL loss of packed tokens, computed from their log-probs and entropies."""

from typing import Any

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, check
from marsrl.kernels.differentiable import first_derivative_only
from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.head.objective import LossInputs, PolicyLoss, PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS, RowProvider
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.reference import policy_loss_reference
from marsrl.kernels.policy_loss.terms import agent_sums, as_read, policy_terms, total_loss


def policy_loss(logprobs: Tensor, entropy: Tensor, inputs: LossInputs) -> PolicyLoss:
    """Compute the loss of inputs.objective from log-probs and entropies; differentiable in both.

    logprobs, entropy: [T] float, nats: the current policy's log-prob and entropy of each token.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("policy_loss", "logprobs", logprobs, (None,), FLOATS)
    num_tokens = logprobs.shape[0]
    check("policy_loss", "entropy", entropy, (num_tokens,), FLOATS, logprobs.device)
    return _OP(logprobs, entropy, policy_tokens("policy_loss", num_tokens, logprobs.device, inputs))


def _on_rows(provider: RowProvider) -> Implementation:
    def run(logprobs: Tensor, entropy: Tensor, tokens: PolicyTokens) -> PolicyLoss:
        logp, ent = as_read(logprobs), as_read(entropy)
        terms = policy_terms(provider.load(), tokens, logp, ent)
        terms.evaluate(Rows.of(None, logp.numel()))  # the kernels skip masked tokens
        sums = terms.sums()
        if torch.is_grad_enabled() and (logprobs.requires_grad or entropy.requires_grad):
            loss = _Loss.apply(logprobs, entropy, terms, sums)
        else:  # without an autograd node, which would take a tenth of the op's time if tokens are few
            loss = total_loss(sums)
        if tokens.mask is not None:
            zero = logp.new_zeros(())  # shared, because each literal 0.0 would become a tensor
            logp, ent = torch.where(tokens.mask, logp, zero), torch.where(tokens.mask, ent, zero)
        return PolicyLoss(loss, logp, ent, terms.coefficient, agent_sums(sums))

    def why_not(logprobs: Tensor, entropy: Tensor, *_: object) -> str | None:
        return provider.why_not(logprobs=logprobs, entropy=entropy)

    return Implementation(provider.name, run, why_not, provider.machine_lacks)


class _Loss(torch.autograd.Function):
    """Autograd node of the loss, whose gradients are the coefficients from the row kernels."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropy: Tensor, terms: PolicyTerms, sums: Tensor) -> Tensor:
        ctx.save_for_backward(terms.coefficient, terms.entropy_coefficient)
        ctx.dtypes = logprobs.dtype, entropy.dtype
        return total_loss(sums)

    @staticmethod
    @first_derivative_only("policy_loss")
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        coefficient, entropy_coefficient = ctx.saved_tensors
        of_logprobs, of_entropy, *_ = ctx.needs_input_grad
        return (
            (grad_output * coefficient).to(ctx.dtypes[0]) if of_logprobs else None,
            (grad_output * entropy_coefficient).to(ctx.dtypes[1]) if of_entropy else None,
            None,
            None,
        )


_OP = Op(
    "policy_loss",
    (
        *map(_on_rows, ROW_PROVIDERS),
        Implementation("reference", policy_loss_reference),
    ),
)
