"""Reference definition of group advantages: index_add over sets of samples, without a loop or host synchronisation."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SetStatistics:
    """Statistics of the values in each sample's set; missing values are left out. All fields are [S]."""

    count: Tensor
    mean: Tensor
    is_single: Tensor  # True if the set has fewer than two values, so that there is nothing to compare


def set_statistics(values: Tensor, set_of: Tensor) -> SetStatistics:
    """Compute the statistics of each sample's set.

    values: [S] float64, NaN = missing. set_of: [S] int64 in [0, S).
    """
    is_present = ~values.isnan()
    count = _total(is_present.double(), set_of)
    mean = _total(torch.where(is_present, values, 0.0), set_of) / count.clamp(min=1)
    return SetStatistics(count[set_of], mean[set_of], (count < 2)[set_of])


def _total(terms: Tensor, set_of: Tensor) -> Tensor:
    return terms.new_zeros(terms.numel()).index_add_(0, set_of, terms)


def _are_equal(values: Tensor, set_of: Tensor) -> Tensor:
    """Return [S] bool, True if all values of the sample's set are equal.

    The minimum is compared with the maximum, because the standard deviation of equal values need not be 0: the mean of eight
    times 0.1 is not exactly 0.1.
    """

    def extreme(fill: float, reduce: str) -> Tensor:
        present = torch.where(values.isnan(), fill, values)
        return values.new_full(values.shape, fill).scatter_reduce_(0, set_of, present, reduce)

    return (extreme(-torch.inf, "amax") == extreme(torch.inf, "amin"))[set_of]


def group_advantage_reference(
    rewards: Tensor,
    compared: Tensor,
    weights: Tensor,
    mean_set_of: Tensor,
    std_set_of: Tensor,
    is_unbiased: bool,
    keeps_single: bool,
    eps: float,
) -> Tensor:
    """Compute A = (R - mean of the mean set) / (std of the std set + eps), [S] in the dtype of rewards.

    rewards: [S]; a missing reward is NaN, and its advantage 0.
    compared: [S] in the dtype of rewards, the values over which means are taken; NaN values are left out.
    weights: [S] float64, weight of each reward in the variance; a set's weights sum to its number of compared values.
    mean_set_of, std_set_of: [S] int64, the sets over which each sample's mean and std are taken.
    is_unbiased: divide the variance by n - 1 instead of n.
    keeps_single: a set with a single value has mean 0 and std 1; otherwise its samples have the advantage 0.
    """
    values, known = compared.double(), rewards.double()
    of_mean = set_statistics(values, mean_set_of)
    of_std = of_mean if std_set_of is mean_set_of else set_statistics(values, std_set_of)
    squares = torch.where(known.isnan(), 0.0, weights * (known - of_std.mean).square())
    freedom = of_std.count - 1 if is_unbiased else of_std.count
    deviation = (_total(squares, std_set_of)[std_set_of] / freedom.clamp(min=1)).sqrt()
    mean = torch.where(of_mean.is_single, 0.0, of_mean.mean)
    std = torch.where(of_std.is_single, 1.0, deviation)
    is_flat = _are_equal(known, mean_set_of) & ~of_mean.is_single | _are_equal(known, std_set_of) & ~of_std.is_single
    is_zero = is_flat | known.isnan()
    if not keeps_single:
        is_zero = is_zero | of_mean.is_single | of_std.is_single
    return torch.where(is_zero, 0.0, (known - mean) / (std + eps)).to(rewards.dtype)


def less_mean_of_others(
    rewards: Tensor, compared: Tensor, session_of: Tensor, mean_set_of: Tensor, keeps_single: bool
) -> Tensor:
    """Compute A = R - mean of the values of the set's other sessions, [S] in the dtype of rewards.

    compared: [S] in the dtype of rewards, one value per session and NaN elsewhere.
    """
    is_compared = ~compared.isnan()
    values = compared.double()
    of_set = set_statistics(values, mean_set_of)
    own = values.new_zeros(values.shape).index_add_(0, session_of, torch.where(is_compared, values, 0.0))[session_of]
    others = of_set.mean + (of_set.mean - own) / (of_set.count - 1).clamp(min=1)
    # Equal rewards have an advantage of exactly 0, even if their mean is rounded.
    others = torch.where(_are_equal(values, mean_set_of), own, others)
    is_zero = rewards.isnan() if keeps_single else rewards.isnan() | of_set.is_single
    return torch.where(is_zero, 0.0, rewards.double() - torch.where(of_set.is_single, 0.0, others)).to(rewards.dtype)
