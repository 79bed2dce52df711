"""Cases that every policy loss must pass."""

from typing import Any

import torch
from torch import Tensor

from marsrl.kernels import PolicyObjective

# name -> (objective, has old log-probs)
OBJECTIVES: dict[str, tuple[PolicyObjective, bool]] = {
    "pseudo on-policy": (PolicyObjective(), False),
    "clip": (PolicyObjective(), True),
    "clip higher, dual clip": (PolicyObjective(clip_high=0.28, dual_clip=1.4), True),
    "no gate": (PolicyObjective(mpt_probability=None), True),
    "strong gate": (PolicyObjective(mpt_probability=0.3), True),
    "cispo": (PolicyObjective(kind="cispo"), True),
    "cispo on-policy": (PolicyObjective(kind="cispo"), False),
    "tis": (PolicyObjective(correction="tis", correction_high=1.1), True),
    "tis on-policy": (PolicyObjective(correction="tis", correction_high=1.1), False),
    "icepop": (PolicyObjective(correction="icepop", correction_low=0.8, correction_high=1.3), True),
    "icepop on-policy": (PolicyObjective(correction="icepop", correction_low=0.8, correction_high=1.3), False),
    "sequence mask": (PolicyObjective(correction="sequence_mask", correction_low=0.95, correction_high=1.1), True),
    "sequence mask on-policy": (
        PolicyObjective(correction="sequence_mask", correction_low=0.95, correction_high=1.1),
        False,
    ),
    "sequence ratio": (PolicyObjective(ratio="sequence", clip_low=0.05, clip_high=0.05), True),
    "sequence ratio on-policy": (PolicyObjective(ratio="sequence"), False),
    "sequence ratio, cispo": (PolicyObjective(ratio="sequence", kind="cispo", clip_low=0.05, clip_high=0.05), True),
    "k1": (PolicyObjective(kl="k1", kl_coef=0.1), True),
    "k1, icepop": (PolicyObjective(kl="k1", kl_coef=0.1, correction="icepop", correction_high=1.3), False),
    "k2, sequence ratio, cispo": (PolicyObjective(kl="k2", kl_coef=0.1, ratio="sequence", kind="cispo"), True),
    "k2": (PolicyObjective(kl="k2", kl_coef=0.1), True),
    "k3": (PolicyObjective(kl="k3", kl_coef=0.1), True),
    "k3, entropy bonus, tis": (
        PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, correction="tis", correction_high=1.2),
        True,
    ),
    "k3, entropy bonus, strong gate": (
        PolicyObjective(kl="k3", kl_coef=0.1, entropy_coef=0.05, mpt_probability=0.3),
        True,
    ),
    "entropy bonus": (PolicyObjective(entropy_coef=0.05), False),
}

WEIGHTED = ("cispo", "sequence mask", "strong gate", "k3, entropy bonus, tis")
"""Objectives that are tested with sequence weights and dropped tokens; the others are tested without."""


def policy_case(num_tokens: int = 60, name: str = "") -> tuple[dict[str, Any], Tensor]:
    """Return (arguments of policy_loss, log-probs [T]); one sequence is empty, agent 1 is absent. name: key of OBJECTIVES."""
    cuts = torch.randint(0, num_tokens + 1, (4,)).sort().values.tolist()
    logprobs = -torch.rand(num_tokens) * 3

    def near() -> Tensor:
        return logprobs + 0.3 * torch.randn(num_tokens)

    arguments = {
        "advantages": torch.randn(6),
        "mask": torch.rand(num_tokens) < 0.7,
        "cu_seqlens": torch.tensor(sorted([0, *cuts, cuts[1], num_tokens])),
        "agent_of": torch.tensor([0, 2, 2, 0, 2, 0]),
        "num_agents": 3,
        "gate": torch.arange(6) % 2 == 0,
        "old_logprobs": near(),
        "rollout_logprobs": near(),
        "reference_logprobs": near(),
        "normaliser": 37.0,
    }
    if name in WEIGHTED:
        arguments["weights"] = torch.linspace(0.3, 1.8, 6)
        arguments["dropped"] = torch.arange(num_tokens) % 9 == 4
    return arguments, logprobs


def poison_masked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with NaN at masked tokens, which must not be read."""
    names = ("old_logprobs", "rollout_logprobs", "reference_logprobs", "temperature")
    given = {name: arguments[name] for name in names if isinstance(arguments.get(name), Tensor)}
    return {**arguments, **{name: values.masked_fill(~arguments["mask"], torch.nan) for name, values in given.items()}}
