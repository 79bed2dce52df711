"""group_advantage: rewards minus the mean of their group, divided by the group's standard deviation."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Shape, normal
from torch import Tensor

from marsrl.kernels import group_advantage

GROUP = 8
EPS = 1e-6


def _shapes(device: str, quick: bool) -> list[Shape]:
    sizes = (64,) if quick else (64, 1024, 16384)
    return [Shape(device, sequences=sequences, note="groups of 8") for sequences in sizes]


def _build(shape: Shape) -> Bench:
    rewards = normal(shape)(shape.sequences)
    group_of = torch.arange(shape.sequences, device=shape.device) // GROUP
    zeros = torch.zeros_like(group_of)
    compared, eager = Compared({"rewards": rewards}), partial(_eager, group_of=group_of)
    variants = [
        compared.variant("ours", lambda values: group_advantage(values, group_of, zeros, group_of, eps=EPS)),
        compared.variant("torch eager", eager),
        compared.variant("a loop over groups", partial(_loop, group_of=group_of)),
    ]
    num_bytes = shape.sequences * (4 + 3 * 8 + 4)  # reward, three ids and advantage per sample
    return Bench(variants, partial(compared.judge, eager), 6.0 * shape.sequences, num_bytes, rewards.nbytes)


def _eager(rewards: Tensor, group_of: Tensor) -> Tensor:
    """Compute the advantages by index_add, without missing rewards, groups of one, or checks."""
    zeros = torch.zeros_like(rewards)
    count = zeros.index_add(0, group_of, torch.ones_like(rewards)).clamp(min=1)
    centred = rewards - (zeros.index_add(0, group_of, rewards) / count)[group_of]
    std = (zeros.index_add(0, group_of, centred * centred) / count).sqrt()[group_of]
    return centred / (std + EPS)


def _loop(rewards: Tensor, group_of: Tensor) -> Tensor:
    """Compute the advantages as other trainers do: a dictionary of lists, then a loop over groups."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_of.tolist()):
        members.setdefault(group, []).append(index)
    advantage = torch.empty_like(rewards)
    for indices in members.values():
        of_group = rewards[indices]
        advantage[indices] = (of_group - of_group.mean()) / (of_group.std(correction=0) + EPS)
    return advantage


CASE = Case("group_advantage", _shapes, _build)
