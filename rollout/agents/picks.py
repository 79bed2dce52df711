"""Picks the outputs of the predecessor that the next agent is asked about (algorithms: adaptive, balanced, paired, random)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal

from marsrl.rollout.types import Sample

PickRule = Literal["adaptive", "balanced", "paired", "random"]


def pick(
    candidates: Sequence[Sample], num_picks: int, rule: PickRule, prefers_right: bool, rng: random.Random
) -> list[Sample]:
    """At most num_picks different samples, sorted by uid; the same whatever order the candidates come in.

    Right means reward.correct >= 1. adaptive: preferred ones first, the rest fills up. balanced: one of each in turn,
    beginning with the preferred kind. paired: equal numbers of both, or none. Ties are broken by rng.
    """
    pool = sorted(candidates, key=lambda sample: sample.uid)
    for one, other in itertools.pairwise(pool):
        if one.uid == other.uid:
            raise ValueError(f"pick: sample {one.uid} is offered twice; uids must be unique in a rollout instance")
    rng.shuffle(pool)
    preferred = [sample for sample in pool if is_right(sample) == prefers_right]
    rest = [sample for sample in pool if is_right(sample) != prefers_right]
    if rule == "adaptive":
        chosen = (preferred + rest)[:num_picks]
    elif rule == "balanced":
        pairs = min(len(preferred), len(rest))
        alternating = [sample for pair in zip(preferred, rest, strict=False) for sample in pair]
        chosen = (alternating + preferred[pairs:] + rest[pairs:])[:num_picks]
    elif rule == "paired":
        each = min(len(preferred), len(rest), num_picks // 2)
        chosen = preferred[:each] + rest[:each]
    elif rule == "random":
        chosen = pool[:num_picks]
    else:
        raise ValueError(f"agents.<name>.pick is {rule!r}; it must be adaptive, balanced, paired or random")
    return sorted(chosen, key=lambda sample: sample.uid)


def is_right(sample: Sample) -> bool:
    """Did the task (for a Verifier: the agreement of its verdict) judge the sample right, before penalties?"""
    return sample.reward.correct >= 1
