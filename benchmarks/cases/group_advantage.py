"""group_advantage: rewards minus the mean of their group, over its deviation."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Judgement, Results, Shape, Variant, normal
from torch import Tensor

from marsrl.kernels import group_advantage

GROUP = 8
EPS = 1e-6


def _shapes(device: str, quick: bool) -> list[Shape]:
    return [
        Shape(device, sequences=sequences, note="groups of 8") for sequences in ((64,) if quick else (64, 1024, 16384))
    ]


def _build(shape: Shape) -> Bench:
    rewards = normal(shape)(shape.sequences)
    group_of = torch.arange(shape.sequences, device=shape.device) // GROUP
    zeros = torch.zeros_like(group_of)

    def ours() -> Results:
        return {"advantage": group_advantage(rewards, group_of, zeros, group_of, eps=EPS)}

    def judge() -> Judgement:
        return Judgement(_eager(rewards.double(), group_of), _eager(rewards, group_of))

    variants = [
        Variant("ours", ours),
        Variant("torch eager", partial(_eager, rewards, group_of)),
        Variant("a loop over groups", partial(_loop, rewards, group_of)),
    ]
    num_bytes = shape.sequences * (4 + 3 * 8 + 4)  # reward, three ids, advantage
    return Bench(variants, [], judge, 6.0 * shape.sequences, num_bytes, rewards.nbytes)


def _eager(rewards: Tensor, group_of: Tensor) -> Results:
    """index_add; no missing rewards, no groups of one, no checks."""
    zeros = torch.zeros_like(rewards)
    count = zeros.index_add(0, group_of, torch.ones_like(rewards)).clamp(min=1)
    centred = rewards - (zeros.index_add(0, group_of, rewards) / count)[group_of]
    std = (zeros.index_add(0, group_of, centred * centred) / count).sqrt()[group_of]
    return {"advantage": centred / (std + EPS)}


def _loop(rewards: Tensor, group_of: Tensor) -> Results:
    """As other trainers do it: a dictionary of lists, then a loop over groups."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_of.tolist()):
        members.setdefault(group, []).append(index)
    advantage = torch.empty_like(rewards)
    for indices in members.values():
        of_group = rewards[indices]
        advantage[indices] = (of_group - of_group.mean()) / (of_group.std(correction=0) + EPS)
    return {"advantage": advantage}


CASE = Case("group_advantage", _shapes, _build)
