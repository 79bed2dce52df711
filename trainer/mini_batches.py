"""A step's credited samples cut into mini-batches, one an optimizer update; groups stay whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

from marsrl.rollout.team import derive_seed
from marsrl.rollout.types import Group
from marsrl.trainer.credit import Credited
from marsrl.trainer.share import MiniBatch, Work


def mini_batches(credited: Credited, groups: Sequence[Group], number: int, *, seed: int, step: int) -> Work:
    """The work of one step in at most `number` mini-batches.

    Groups in an order drawn from (seed, step) go one by one to the mini-batch with the fewest samples in the loss's
    denominator; each has a denominator of its own, the sampled tokens of its groups (algorithms: "per update"). A
    mini-batch that nothing in would train is left out; its tokens are then in no denominator.
    """
    order = sorted(groups, key=lambda group: group.group_id)
    random.Random(derive_seed(seed, "mini-batches", str(step))).shuffle(order)
    members: list[set[str]] = [set() for _ in range(number)]  # uids
    for group in order:
        uids = {sample.uid for sample in group.samples if sample.uid in credited.counted}
        min(members, key=len).update(uids)
    cut = [
        MiniBatch(
            tuple(sequence for sequence in credited.sequences if sequence.uid in uids),
            sum(credited.counted[uid] for uid in uids),
        )
        for uids in members
    ]
    return Work(tuple(part for part in cut if part.sequences) or (MiniBatch((), credited.num_tokens),))
