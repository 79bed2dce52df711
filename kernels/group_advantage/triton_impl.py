"""Group advantages in Triton: samples sorted by set, one program a set, no host loop and no wait for the device."""
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from marsrl.kernels.triton_machine import on_device_of

_BLOCK = 128  # a group has 8 to 64 samples, an instance of five agents some hundred


@triton.jit
def _set_statistics(
    rewards,
    order,
    bounds,
    mean_of_set,
    std_of_set,
    kind_of_set,
    is_unbiased,
    BLOCK: tl.constexpr,
):
    """Mean, std and kind (0 usual, 1 single, 2 flat) of set i, whose samples are order[bounds[i] : bounds[i + 1]].

    Sums are taken in float64 over the samples in the order of their index: two runs give the same bits.
    """
    i = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(bounds + i), tl.load(bounds + i + 1)
    infinity = float("inf")
    count = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    lowest = tl.full((), infinity, tl.float64)
    highest = tl.full((), -infinity, tl.float64)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        sample = tl.load(order + place, mask=place < end, other=0)
        reward = tl.load(rewards + sample, mask=place < end, other=float("nan"))
        is_present = reward == reward  # a NaN is a missing reward
        count += tl.sum(is_present.to(tl.float64))
        total += tl.sum(tl.where(is_present, reward, 0.0))
        lowest = tl.minimum(lowest, tl.min(tl.where(is_present, reward, infinity)))
        highest = tl.maximum(highest, tl.max(tl.where(is_present, reward, -infinity)))
    mean = total / tl.maximum(count, 1.0)
    squares = tl.zeros((), tl.float64)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        sample = tl.load(order + place, mask=place < end, other=0)
        reward = tl.load(rewards + sample, mask=place < end, other=float("nan"))
        distance = tl.where(reward == reward, reward - mean, 0.0)
        squares += tl.sum(distance * distance)
    divisor = tl.maximum(count - is_unbiased, 1.0)
    is_single = count < 2
    # By the ends, not by std == 0: the mean of eight times 0.1 is not 0.1 to the last bit.
    kind = tl.where(is_single, 1, tl.where(lowest == highest, 2, 0))
    tl.store(mean_of_set + i, tl.where(is_single, 0.0, mean))
    tl.store(std_of_set + i, tl.where(is_single, 1.0, tl.sqrt(squares / divisor)))
    tl.store(kind_of_set + i, kind)


@triton.jit
def _advantages(
    rewards,
    mean_set_of,
    std_set_of,
    mean_of_set,
    kind_of_mean_set,
    std_of_set,
    kind_of_std_set,
    eps,
    advantage,
    num_samples,
    KEEPS_SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_sample = i < num_samples
    reward = tl.load(rewards + i, mask=is_sample, other=0.0)
    mean_set = tl.load(mean_set_of + i, mask=is_sample, other=0)
    std_set = tl.load(std_set_of + i, mask=is_sample, other=0)
    mean = tl.load(mean_of_set + mean_set, mask=is_sample, other=0.0)
    std = tl.load(std_of_set + std_set, mask=is_sample, other=1.0)
    mean_kind = tl.load(kind_of_mean_set + mean_set, mask=is_sample, other=0)
    std_kind = tl.load(kind_of_std_set + std_set, mask=is_sample, other=0)
    is_zero = (reward != reward) | (mean_kind == 2) | (std_kind == 2)
    if not KEEPS_SINGLE:
        is_zero = is_zero | (mean_kind == 1) | (std_kind == 1)
    tl.store(advantage + i, tl.where(is_zero, 0.0, (reward - mean) / (std + tl.load(eps))), mask=is_sample)


def group_advantage_triton(
    rewards: Tensor, mean_set_of: Tensor, std_set_of: Tensor, is_unbiased: bool, keeps_single: bool, eps: float
) -> Tensor:
    """A = (R - mean of the mean set) / (std of the std set + eps), [S] in the dtype of rewards."""
    num_samples = rewards.numel()
    if num_samples == 0:
        return torch.empty_like(rewards)
    wide = rewards.detach().double().contiguous()
    with on_device_of(wide):
        mean, std, kind = _statistics(wide, mean_set_of, is_unbiased)
        kind_of_std = kind
        if std_set_of is not mean_set_of:
            _, std, kind_of_std = _statistics(wide, std_set_of, is_unbiased)
        advantage = torch.empty_like(wide)
        _advantages[(triton.cdiv(num_samples, _BLOCK),)](
            wide,
            mean_set_of.contiguous(),
            std_set_of.contiguous(),
            mean,
            kind,
            std,
            kind_of_std,
            wide.new_full((1,), eps),  # a number would arrive as float32
            advantage,
            num_samples,
            KEEPS_SINGLE=keeps_single,
            BLOCK=_BLOCK,
        )
    return advantage.to(rewards.dtype)


def _statistics(rewards: Tensor, set_of: Tensor, is_unbiased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, std, kind) of every set id, [S] each."""
    num_samples = rewards.numel()
    sorted_sets, order = set_of.sort(stable=True)
    ids = torch.arange(num_samples + 1, device=rewards.device)
    bounds = torch.searchsorted(sorted_sets, ids)
    mean, std = torch.empty_like(rewards), torch.empty_like(rewards)
    kind = torch.empty(num_samples, dtype=torch.int32, device=rewards.device)
    _set_statistics[(num_samples,)](rewards, order, bounds, mean, std, kind, int(is_unbiased), BLOCK=_BLOCK)
    return mean, std, kind
