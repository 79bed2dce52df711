"""Group advantages through csrc/cpu/segments.cpp, which adds in the same order as the reference."""

import torch
from torch import Tensor

from marsrl.kernels.library import cpu_library


def group_advantage_cpu(
    rewards: Tensor,
    compared: Tensor,
    weights: Tensor,
    mean_set_of: Tensor,
    std_set_of: Tensor,
    is_unbiased: bool,
    keeps_single: bool,
    eps: float,
) -> Tensor:
    """Compute A = (R - mean of the mean set) / (std of the std set + eps); arguments as in reference.py."""
    contiguous_rewards = rewards.detach().contiguous()
    mean_sets = mean_set_of.contiguous()
    std_sets = mean_sets if std_set_of is mean_set_of else std_set_of.contiguous()
    advantage = torch.empty_like(contiguous_rewards)
    cpu_library().marsrl_group_advantage(
        *(
            contiguous_rewards,
            compared.contiguous(),
            weights.contiguous(),
            contiguous_rewards.dtype == torch.float64,
            mean_sets,
            std_sets,
            contiguous_rewards.numel(),
        ),
        *(is_unbiased, keeps_single, eps, advantage),
    )
    return advantage
