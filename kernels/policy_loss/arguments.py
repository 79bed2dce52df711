"""Checks of a policy loss's inputs, and expansion of per-sample values to tokens."""

import torch
from torch import Tensor

from marsrl.kernels.checks import FLOATS, INTEGERS, check, check_cu_seqlens, check_range, sequence_of_tokens
from marsrl.kernels.head.objective import LossInputs, PolicyObjective, PolicyTokens
from marsrl.kernels.library import cpu_library, why_no_cpu_library

# Fields of LossInputs as (name, True if [T] or False if [S], accepted dtypes).
_EXPECTED: tuple[tuple[str, bool, tuple[torch.dtype, ...]], ...] = (
    ("advantages", False, FLOATS),
    ("token_advantages", True, FLOATS),
    ("mask", True, (torch.bool,)),
    ("weights", False, FLOATS),
    ("gate", False, (torch.bool,)),
    ("dropped", True, (torch.bool,)),
    ("agent_of", False, INTEGERS),
    ("old_logprobs", True, FLOATS),
    ("rollout_logprobs", True, FLOATS),
    ("reference_logprobs", True, FLOATS),
)


def policy_tokens(op: str, num_tokens: int, device: torch.device, inputs: LossInputs) -> PolicyTokens:
    """Check a loss's inputs for num_tokens tokens, and expand them to one element per token.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    objective, num_agents, normaliser = inputs.objective, inputs.num_agents, inputs.normaliser
    if not isinstance(objective, PolicyObjective):
        raise ValueError(f"{op}: objective is a {type(objective).__name__}, expected a PolicyObjective")
    if num_agents < 1:
        raise ValueError(f"{op}: num_agents is {num_agents}, expected 1 or more")
    num_sequences = check_cu_seqlens(op, inputs.cu_seqlens, num_tokens, device)
    if (inputs.advantages is None) == (inputs.token_advantages is None):
        found = "neither" if inputs.advantages is None else "both"
        raise ValueError(f"{op}: {found} of advantages [S] and token_advantages [T] given, expected exactly one")
    of_sequences, of_tokens = (num_sequences,), (num_tokens,)
    for name, is_of_tokens, dtypes in _EXPECTED:
        if (values := getattr(inputs, name)) is not None:
            check(op, name, values, of_tokens if is_of_tokens else of_sequences, dtypes, device)
    if inputs.agent_of is not None:
        check_range(op, "agent_of", inputs.agent_of, num_agents - 1)
    elif num_agents != 1:
        raise ValueError(f"{op}: num_agents is {num_agents} and agent_of is missing, expected agent_of [S]")
    if objective.correction != "none" and inputs.rollout_logprobs is None:
        raise ValueError(f"{op}: rollout_logprobs is missing, expected [T] for correction={objective.correction!r}")
    if objective.kl != "none" and inputs.reference_logprobs is None:
        raise ValueError(f"{op}: reference_logprobs is missing, expected [T] for kl={objective.kl!r}")
    if isinstance(normaliser, Tensor) and normaliser.numel() != 1:
        raise ValueError(f"{op}: normaliser has shape {list(normaliser.shape)}, expected one number")
    if (not isinstance(normaliser, Tensor) or normaliser.device.type == "cpu") and not normaliser > 0:
        raise ValueError(f"{op}: normaliser is {normaliser}, expected a positive number")
    sequence_of = _sequence_of(inputs.cu_seqlens, num_tokens)

    def joined(values: Tensor) -> Tensor:
        return values.index_select(0, sequence_of)

    def joined_or_none(values: Tensor | None, is_needed: bool = True) -> Tensor | None:
        return None if values is None or not is_needed else joined(values)

    advantages = inputs.token_advantages
    if advantages is None:
        assert inputs.advantages is not None
        advantages = joined(inputs.advantages)
    return PolicyTokens(
        objective=objective,
        advantages=advantages,
        mask=inputs.mask,
        cu_seqlens=inputs.cu_seqlens,
        sequence_of=sequence_of,
        agent_of=None if inputs.agent_of is None or num_agents == 1 else joined(inputs.agent_of.long()),
        num_agents=num_agents,
        gate=joined_or_none(inputs.gate, objective.mpt_probability is not None),
        old_logprobs=inputs.old_logprobs,
        # Drop inputs that the objective does not use, so that no implementation reads them.
        rollout_logprobs=inputs.rollout_logprobs if (objective.correction, objective.kl) != ("none", "none") else None,
        reference_logprobs=inputs.reference_logprobs if objective.kl != "none" else None,
        normaliser=normaliser,
        weights=joined_or_none(inputs.weights),
        dropped=inputs.dropped,
    )


def _sequence_of(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [T] int64, the sequence of each token, like sequence_of_tokens.

    On the CPU this is one C call. If tokens are few, PyTorch's three calls would take 5 % of the op's time.
    """
    if cu_seqlens.device.type != "cpu" or why_no_cpu_library() is not None:
        return sequence_of_tokens(cu_seqlens, num_tokens)
    bounds = cu_seqlens.contiguous()
    sequence_of = torch.empty(num_tokens, dtype=torch.int64, device="cpu")
    cpu_library().marsrl_sequence_of(bounds, bounds.dtype == torch.int64, bounds.numel() - 1, sequence_of)
    return sequence_of
