"""policy_loss: the RL loss of packed tokens whose log-probs come from elsewhere."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from marsrl.kernels.checks import FLOATS, check
from marsrl.kernels.dispatch import Implementation, Op
from marsrl.kernels.head.objective import PolicyLoss, PolicyObjective, PolicyTokens
from marsrl.kernels.head.rows.protocol import PolicyTerms
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS, RowProvider
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.reference import policy_loss_reference
from marsrl.kernels.policy_loss.terms import agent_sums, policy_terms, total_loss


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    *,
    objective: PolicyObjective,
    advantages: Tensor | None = None,
    token_advantages: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor,
    agent_of: Tensor | None = None,
    num_agents: int = 1,
    gate: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    normaliser: float | Tensor,
    weights: Tensor | None = None,
    dropped: Tensor | None = None,
) -> PolicyLoss:
    """The loss of `objective` on given log-probs, differentiable through logprobs and entropy.

    Args:
        logprobs, entropy: [T] float, nats, of the policy in training.
        advantages | token_advantages: [S] or [T] float, exactly one.
        mask: [T] bool, True = the token is trained; None = all. Nothing is read where it is False.
        cu_seqlens: [S+1] int, boundaries of the packed sequences; empty ones are allowed.
        agent_of: [S] int in [0, num_agents); None = one agent.
        gate: [S] bool from mpt_gate; None = no token is masked for being well mastered.
        old_logprobs: [T] float of the policy before the update; None = pseudo on-policy: ratio 1, gradient of A log p.
        rollout_logprobs, reference_logprobs: [T] float; needed by correction and by kl.
        normaliser: number or one-element tensor; the loss is divided by it, once.
        weights: [S] float, factor on every term of a sequence's tokens, KL and entropy bonus included; None = 1.
        dropped: [T] bool, tokens that are masked whatever the gate and the correction say; None = none.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    check("policy_loss", "logprobs", logprobs, (None,), FLOATS)
    num_tokens = logprobs.shape[0]
    check("policy_loss", "entropy", entropy, (num_tokens,), FLOATS, logprobs.device)
    tokens = policy_tokens(
        "policy_loss",
        num_tokens,
        logprobs.device,
        objective=objective,
        advantages=advantages,
        token_advantages=token_advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        agent_of=agent_of,
        num_agents=num_agents,
        gate=gate,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        reference_logprobs=reference_logprobs,
        normaliser=normaliser,
        weights=weights,
        dropped=dropped,
    )
    return _OP(logprobs, entropy, objective, tokens)


def _on_rows(provider: RowProvider) -> Implementation:
    def run(logprobs: Tensor, entropy: Tensor, objective: PolicyObjective, tokens: PolicyTokens) -> PolicyLoss:
        kernels = provider.load()
        logp = logprobs.detach().float().contiguous()
        ent = entropy.detach().float().contiguous()
        terms = policy_terms(kernels, objective, tokens, logp, ent)
        terms.evaluate(Rows.of(None, logp.numel()))  # the kernels skip what is masked
        sums = terms.sums()
        loss = _Loss.apply(logprobs, entropy, terms, total_loss(sums))
        if tokens.mask is not None:
            logp, ent = torch.where(tokens.mask, logp, 0.0), torch.where(tokens.mask, ent, 0.0)
        return PolicyLoss(loss, logp, ent, terms.coefficient, agent_sums(sums))

    def why_not(logprobs: Tensor, entropy: Tensor, *_: object) -> str | None:
        return provider.why_not(logprobs=logprobs, entropy=entropy)

    return Implementation(provider.name, run, why_not, provider.machine_lacks)


class _Loss(torch.autograd.Function):
    """The loss that the row kernel found, with its coefficients as the gradient."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, entropy: Tensor, terms: PolicyTerms, loss: Tensor) -> Tensor:
        ctx.save_for_backward(terms.coefficient, terms.entropy_coefficient)
        ctx.dtypes = logprobs.dtype, entropy.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gradients = [
            (grad_output * coefficient).to(dtype) if is_wanted else None
            for coefficient, dtype, is_wanted in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
        ]
        return gradients[0], gradients[1], None, None


_OP = Op(
    "policy_loss",
    (
        *map(_on_rows, ROW_PROVIDERS),
        Implementation("reference", policy_loss_reference),
    ),
)
