"""Group advantages in plain PyTorch: index_add over sets of samples; no loop, no host synchronisation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SetStatistics:
    """Statistics of the set that each sample is compared with, all [S]; missing values are left out."""

    count: Tensor
    mean: Tensor
    std: Tensor
    is_single: Tensor  # fewer than two values: no sibling to compare with
    is_flat: Tensor  # two or more values, all equal


def set_statistics(rewards: Tensor, is_present: Tensor, set_of: Tensor, is_unbiased: bool) -> SetStatistics:
    """Compute mean and standard deviation of each sample's set; rewards [S] float64, set_of [S] int64 in [0, S)."""

    def total(terms: Tensor) -> Tensor:
        return terms.new_zeros(rewards.numel()).index_add_(0, set_of, terms)

    def extreme(fill: float, reduce: str) -> Tensor:
        values = torch.where(is_present, rewards, fill)
        return rewards.new_full(rewards.shape, fill).scatter_reduce_(0, set_of, values, reduce)

    values, present = torch.where(is_present, rewards, 0.0), is_present.double()
    count = total(present)
    mean = (total(values) / count.clamp(min=1))[set_of]
    squares = total(((values - mean) * present).square())
    std = (squares / (count - 1 if is_unbiased else count).clamp(min=1)).sqrt()[set_of]
    is_single = (count < 2)[set_of]
    # Compare the extremes rather than std with 0: the mean of eight times 0.1 is not exactly 0.1.
    is_flat = (extreme(-torch.inf, "amax") == extreme(torch.inf, "amin"))[set_of] & ~is_single
    return SetStatistics(count[set_of], mean, std, is_single, is_flat)


def group_advantage_reference(
    rewards: Tensor,
    compared: Tensor,
    mean_set_of: Tensor,
    std_set_of: Tensor,
    is_unbiased: bool,
    keeps_single: bool,
    eps: float,
) -> Tensor:
    """Compute A = (R - mean of the mean set) / (std of the std set + eps), [S] in the dtype of rewards.

    compared: [S] like rewards, the values over which mean and std are taken; NaN values are left out.
    """
    is_compared = ~compared.isnan()
    values = compared.double()
    of_mean = set_statistics(values, is_compared, mean_set_of, is_unbiased)
    of_std = of_mean if std_set_of is mean_set_of else set_statistics(values, is_compared, std_set_of, is_unbiased)
    mean = torch.where(of_mean.is_single, 0.0, of_mean.mean)
    std = torch.where(of_std.is_single, 1.0, of_std.std)
    is_zero = of_mean.is_flat | of_std.is_flat | rewards.isnan()
    if not keeps_single:
        is_zero = is_zero | of_mean.is_single | of_std.is_single
    return torch.where(is_zero, 0.0, (rewards.double() - mean) / (std + eps)).to(rewards.dtype)


def less_mean_of_others(
    rewards: Tensor, compared: Tensor, session_of: Tensor, mean_set_of: Tensor, keeps_single: bool
) -> Tensor:
    """Compute A = R - mean of the set's values, without the sample's own session, [S] in the dtype of rewards.

    compared: [S] like rewards, one value per session; NaN elsewhere.
    """
    is_compared = ~compared.isnan()
    values = compared.double()
    found = set_statistics(values, is_compared, mean_set_of, is_unbiased=False)
    own = values.new_zeros(values.shape).index_add_(0, session_of, torch.where(is_compared, values, 0.0))[session_of]
    others = found.mean + (found.mean - own) / (found.count - 1).clamp(min=1)
    others = torch.where(found.is_flat, own, others)  # Exactly 0 for equal rewards, even if the mean is rounded.
    is_zero = rewards.isnan() if keeps_single else rewards.isnan() | found.is_single
    return torch.where(is_zero, 0.0, rewards.double() - torch.where(found.is_single, 0.0, others)).to(rewards.dtype)
