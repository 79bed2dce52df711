"""group_advantage: a sample's reward relative to its siblings'."""

import torch
from torch import Tensor

from marsrl.kernels import library
from marsrl.kernels.checks import INTEGERS, check, check_range
from marsrl.kernels.dispatch import Implementation, Op, of_first, why_not_host
from marsrl.kernels.group_advantage.cpu import group_advantage_cpu
from marsrl.kernels.group_advantage.reference import group_advantage_reference

# normalise -> (set of the mean, set of the standard deviation)
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
    normalise: str = "group",
    std: str = "biased",
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Tensor:
    """A = (R - mean) / (std + eps) over the sample's set (arXiv:2402.03300, section 4.1.2; arXiv:2602.08847).

    Args:
        rewards: [S] float; NaN = missing: left out of mean, std and count, its advantage is 0.
        group_of: [S] int in [0, S): samples decoded from the same input.
        agent_of: [S] int in [0, S).
        instance_of: [S] int in [0, S): the draw of a problem that the sample belongs to.
        normalise: "group": mean and std over the group. "agent" (Dr. MAS): over all samples of an agent in an instance.
            "global": over the instance. "agent_mean", "agent_std": only the mean, or only the std, over the agent's
            samples, the other over the instance.
        std: "biased" (1/n) or "unbiased" (1/(n-1)).
        singleton: a set with one reward: "zero" = advantage 0; "raw" = its mean is 0 and its std 1.

    Returns:
        [S] in the dtype of rewards. A set whose rewards are all equal gets exactly 0.

    Raises:
        ValueError: names the argument, what was found and what was expected.
    """
    for name, found, allowed in (
        ("normalise", normalise, _SETS),
        ("std", std, ("biased", "unbiased")),
        ("singleton", singleton, ("zero", "raw")),
    ):
        if found not in allowed:
            raise ValueError(f"group_advantage: {name} is {found!r}, expected {' or '.join(allowed)}")
    check("group_advantage", "rewards", rewards, (None,), (torch.float32, torch.float64))
    num_samples = rewards.shape[0]
    for name, ids in (("group_of", group_of), ("agent_of", agent_of), ("instance_of", instance_of)):
        check("group_advantage", name, ids, (num_samples,), INTEGERS, rewards.device)
        check_range("group_advantage", name, ids, num_samples - 1)
    sets = {"group": group_of.long, "agent": lambda: _pair(instance_of, agent_of), "instance": instance_of.long}
    mean_set, std_set = _SETS[normalise]
    mean_set_of = sets[mean_set]()
    std_set_of = mean_set_of if std_set == mean_set else sets[std_set]()
    return _OP(rewards, mean_set_of, std_set_of, std == "unbiased", singleton == "raw", eps)


def _pair(first: Tensor, second: Tensor) -> Tensor:
    """[S] int64 in [0, S): equal where both ids are equal."""
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
