"""Split of a step's credited samples of one policy into mini-batches, one for each optimizer update; groups stay whole.

Each update gets its denominators here, before packing, so that they cannot depend on ranks, micro-batches or the split of a
sequence over ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from marsrl.rollout.seed import derive_seed
from marsrl.trainer.data.credit import Credited
from marsrl.trainer.data.packing import TrainSequence
from marsrl.trainer.data.scatter import MiniBatch


@dataclass(frozen=True, slots=True)
class Average:
    """Reduction of token losses to one number: loss.aggregation over the denominator of credit.denominator.

    A token of sample i of agent k adds its term l times

        token                   1 / sum_j |o_j|
        sequence                1 / (S |o_i|)
        sequence_sum_constant   1 / (S max_tokens)

    |o|: sampled tokens; j runs over the S samples of the update ("all") or over those of agent k ("agent": every agent
    has a mean of its own, and the means are added up). Samples whose gradient is 0 count (credit.count_zero_groups).
    """

    aggregation: Literal["token", "sequence", "sequence_sum_constant"] = "token"
    denominator: Literal["all", "agent"] = "all"
    max_tokens: int = 1

    def size(self, num_tokens: int) -> int:
        """Contribution to the denominator of a sample with so many tokens."""
        return {"token": num_tokens, "sequence": 1, "sequence_sum_constant": self.max_tokens}[self.aggregation]


def mini_batches(credited: Credited, number: int, average: Average, *, seed: int, step: int) -> tuple[MiniBatch, ...]:
    """One step in at most `number` mini-batches, an optimizer update each, in order.

    Groups, in an order drawn from (seed, step), each go to the mini-batch with the fewest samples in the loss's denominator;
    each mini-batch has the denominators of its own groups. A mini-batch without a gradient is dropped; its tokens are then in no
    denominator.
    """
    order = sorted(credited.groups, key=lambda group: group.group_id)
    random.Random(derive_seed(seed, "mini-batches", str(step))).shuffle(order)
    members: list[dict[str, str]] = [{} for _ in range(number)]  # {uid: agent}
    for group in order:
        agent_of = {sample.uid: group.agent for sample in group.samples if sample.uid in credited.counted}
        min(members, key=len).update(agent_of)
    cut = [_averaged(credited, agent_of, average) for agent_of in members]
    return tuple(part for part in cut if part.sequences) or (MiniBatch((), 0.0),)


def _averaged(credited: Credited, agent_of: Mapping[str, str], average: Average) -> MiniBatch:
    """The samples of these uids with their denominators: one number for all, or a weight of each sample."""
    totals: Counter[str] = Counter()  # by agent
    for uid, agent in agent_of.items():
        totals[agent] += credited.copies.get(uid, 1) * average.size(credited.counted[uid])

    def weight(sequence: TrainSequence) -> float:
        of_sample = max(1, credited.counted[sequence.uid]) if average.aggregation == "sequence" else 1
        of_agent = max(1, totals[agent_of[sequence.uid]]) if average.denominator == "agent" else 1
        return credited.copies.get(sequence.uid, 1) / (of_sample * of_agent)

    sequences = tuple(
        replace(sequence, weight=weight(sequence)) for sequence in credited.sequences if sequence.uid in agent_of
    )
    return MiniBatch(sequences, 1.0 if average.denominator == "agent" else float(sum(totals.values())))
