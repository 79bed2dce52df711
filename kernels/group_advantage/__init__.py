"""Advantages: rewards of samples relative to the rewards of a set of comparable samples."""

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.checks import INTEGERS, check, check_range
from marsrl.kernels.dispatch import Implementation, Op, of_first, why_not_host
from marsrl.kernels.group_advantage.cpu import group_advantage_cpu
from marsrl.kernels.group_advantage.reference import group_advantage_reference, less_mean_of_others

# normalise -> (set over which the mean is taken, set over which the standard deviation is taken)
_SETS = {
    "group": ("group", "group"),
    "agent": ("agent", "agent"),
    "global": ("instance", "instance"),
    "agent_mean": ("agent", "instance"),
    "agent_std": ("instance", "agent"),
}


def group_advantage(
    rewards: Tensor,
    group_of: Tensor,
    agent_of: Tensor,
    instance_of: Tensor,
    *,
    session_of: Tensor | None = None,
    normalise: str = "group",
    std: str = "biased",
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """Compute A = (R - mean) / (std + eps) over each sample's set.

    See arXiv:2402.03300, section 4.1.2, and arXiv:2602.08847.

    Args:
        rewards: [S] float. NaN is a missing reward: it is left out of mean, std and count, and its advantage is 0.
        group_of: [S] int in [0, S), the group of each sample. The samples of a group were decoded from the same input.
        agent_of: [S] int in [0, S), the agent that wrote each sample.
        instance_of: [S] int in [0, S), the rollout instance (one draw of a problem) that each sample belongs to.
        session_of: [S] int in [0, S), the session of each sample. A session's samples must be in the same sets, and each of a
            session's n rewards has the weight 1/n. None: every sample counts by itself.
        normalise: "group": take mean and std over the group. "agent" (Dr. MAS): over all samples of the agent in the instance.
            "global": over the whole instance. "agent_mean": the mean over the agent's samples, the std over the instance.
            "agent_std": the reverse.
        std: "biased" (1/n) or "unbiased" (1/(n-1)); "none": A = R - mean of the set's other rewards, without division (RLOO,
            arXiv:2402.14740). Then "agent_mean" equals "agent", and "agent_std" equals "global".
        singleton: treatment of a set with the reward of only one sample or session. "zero": the advantage is 0. "raw": mean 0 and
            std 1, so that the advantage is nearly the reward.

    Returns:
        [S] in the dtype of rewards. A set whose rewards are all equal gets exactly 0.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    for name, value, allowed in (
        ("normalise", normalise, _SETS),
        ("std", std, ("biased", "unbiased", "none")),
        ("singleton", singleton, ("zero", "raw")),
    ):
        if value not in allowed:
            raise ValueError(f"group_advantage: {name} is {value!r}, expected {' or '.join(allowed)}")
    check("group_advantage", "rewards", rewards, (None,), (torch.float32, torch.float64))
    num_samples = rewards.shape[0]
    sessions = () if session_of is None else (("session_of", session_of),)
    for name, ids in (("group_of", group_of), ("agent_of", agent_of), ("instance_of", instance_of), *sessions):
        check("group_advantage", name, ids, (num_samples,), INTEGERS, rewards.device)
        check_range("group_advantage", name, ids, num_samples - 1)
    sets = {"group": group_of.long, "agent": lambda: _pair(instance_of, agent_of), "instance": instance_of.long}
    mean_set, std_set = _SETS[normalise]
    mean_set_of = sets[mean_set]()
    std_set_of = mean_set_of if std_set == mean_set else sets[std_set]()
    if session_of is None:
        session_of = torch.arange(num_samples, device=rewards.device)
        compared, weights = rewards, torch.ones_like(rewards, dtype=torch.float64)
    else:
        compared, weights = _session_means(rewards, session_of.long())
    if std == "none":
        return less_mean_of_others(rewards, compared, session_of.long(), mean_set_of, singleton == "raw")
    return _OP(rewards, compared, weights, mean_set_of, std_set_of, std == "unbiased", singleton == "raw", eps)


def _session_means(rewards: Tensor, session_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return (means, weights), both [S].

    means, in the dtype of rewards: a session's mean reward at the session's first sample, NaN at its other samples. weights,
    float64: 1/n for each of a session's n rewards, 0 where a reward is missing.
    """
    places = (~rewards.isnan()).nonzero().squeeze(1)
    sessions, wide = session_of[places], rewards.double()
    num_samples = rewards.numel()
    first = places.new_full((num_samples,), num_samples).scatter_reduce_(0, sessions, places, "amin")
    # Average differences from the first reward, so that the mean of equal rewards equals them to the bit.
    difference = wide[places] - wide[first[sessions]]
    total, count = (
        wide.new_zeros(num_samples).index_add_(0, sessions, x) for x in (difference, torch.ones_like(difference))
    )
    means = rewards.new_full((num_samples,), torch.nan)
    means[places] = torch.where(first[sessions] == places, wide[places] + (total / count)[sessions], torch.nan).to(
        means.dtype
    )
    weights = torch.zeros_like(wide)
    weights[places] = 1 / count[sessions]
    return means, weights


def _pair(first: Tensor, second: Tensor) -> Tensor:
    """Number the distinct pairs (first[i], second[i]); returns [S] int64 in [0, S)."""
    keys, order = (first.long() * first.numel() + second).sort()
    rank = torch.zeros_like(keys)
    rank[1:] = (keys[1:] != keys[:-1]).cumsum(0)
    return torch.empty_like(rank).scatter_(0, order, rank)


_OP = Op(
    "group_advantage",
    (
        Implementation("cpu", group_advantage_cpu, of_first(why_not_host, "rewards"), library.why_no_cpu_library),
        Implementation("reference", group_advantage_reference),
    ),
)
