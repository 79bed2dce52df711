"""Checks what a policy loss is given, and spreads what is per sample over the tokens."""

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, INTEGERS, check, check_cu_seqlens, check_range, sequence_of_tokens
from marsrl.kernels.head.objective import PolicyObjective, PolicyTokens


def policy_tokens(
    op: str,
    num_tokens: int,
    device: torch.device,
    *,
    objective: PolicyObjective,
    advantages: Tensor | None,
    token_advantages: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor,
    agent_of: Tensor | None,
    num_agents: int,
    gate: Tensor | None,
    old_logprobs: Tensor | None,
    rollout_logprobs: Tensor | None,
    reference_logprobs: Tensor | None,
    normaliser: float | Tensor,
    weights: Tensor | None = None,
    dropped: Tensor | None = None,
) -> PolicyTokens:
    """The arguments as PolicyTokens; ValueError names the argument, what was found and what was expected."""
    if not isinstance(objective, PolicyObjective):
        raise ValueError(f"{op}: objective is a {type(objective).__name__}, expected a PolicyObjective")
    num_sequences = check_cu_seqlens(op, cu_seqlens, num_tokens, device)
    if (advantages is None) == (token_advantages is None):
        found = "neither" if advantages is None else "both"
        raise ValueError(f"{op}: {found} of advantages [S] and token_advantages [T] given, expected exactly one")
    sequence_of = sequence_of_tokens(cu_seqlens, num_tokens)
    if token_advantages is not None:
        check(op, "token_advantages", token_advantages, (num_tokens,), FLOATS, device)
        advantages_of_tokens = token_advantages
    else:
        assert advantages is not None
        check(op, "advantages", advantages, (num_sequences,), FLOATS, device)
        advantages_of_tokens = advantages.index_select(0, sequence_of)
    if mask is not None:
        check(op, "mask", mask, (num_tokens,), (torch.bool,), device)
    if weights is not None:
        check(op, "weights", weights, (num_sequences,), FLOATS, device)
    if gate is not None:
        check(op, "gate", gate, (num_sequences,), (torch.bool,), device)
    if dropped is not None:
        check(op, "dropped", dropped, (num_tokens,), (torch.bool,), device)
    if agent_of is not None:
        check(op, "agent_of", agent_of, (num_sequences,), INTEGERS, device)
        check_range(op, "agent_of", agent_of, num_agents - 1)
    elif num_agents != 1:
        raise ValueError(f"{op}: num_agents is {num_agents} and agent_of is missing, expected agent_of [S]")
    given = {
        "old_logprobs": old_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "reference_logprobs": reference_logprobs,
    }
    for name, values in given.items():
        if values is not None:
            check(op, name, values, (num_tokens,), FLOATS, device)
    if objective.correction != "none" and rollout_logprobs is None:
        raise ValueError(f"{op}: rollout_logprobs is missing, expected [T] for correction={objective.correction!r}")
    if objective.kl != "none" and reference_logprobs is None:
        raise ValueError(f"{op}: reference_logprobs is missing, expected [T] for kl={objective.kl!r}")
    if isinstance(normaliser, Tensor):
        if normaliser.numel() != 1:
            raise ValueError(f"{op}: normaliser has shape {list(normaliser.shape)}, expected one number")
    elif not normaliser > 0:
        raise ValueError(f"{op}: normaliser is {normaliser}, expected a positive number")

    return PolicyTokens(
        advantages=advantages_of_tokens,
        mask=mask,
        cu_seqlens=cu_seqlens,
        sequence_of=sequence_of,
        num_sequences=num_sequences,
        agent_of=None if agent_of is None or num_agents == 1 else agent_of.index_select(0, sequence_of),
        num_agents=num_agents,
        gate=None if gate is None or objective.mpt_probability is None else gate.index_select(0, sequence_of),
        old_logprobs=old_logprobs,
        # What the objective does not use is dropped here, so that no implementation looks at it.
        rollout_logprobs=rollout_logprobs if objective.correction != "none" else None,
        reference_logprobs=reference_logprobs if objective.kl != "none" else None,
        normaliser=normaliser,
        weights=None if weights is None else weights.index_select(0, sequence_of),
        dropped=dropped,
    )
