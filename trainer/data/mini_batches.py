"""Split of a policy's credited samples into mini-batches, one per optimizer update; groups stay whole.

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

    The weight of each token of sample i of agent k in the loss:

        token                   1 / sum_j |o_j|
        sequence                1 / (S' n_i |o_i|)
        sequence_sum_constant   1 / (S max_tokens)

    |o_i|: number of sampled tokens. j runs over the S samples of the update (denominator "all"), or only over those of agent k
    ("agent": each agent has a mean, and the means are added). n_i: number of agent k's samples in the same session; 1 if no
    program played. S': number of samples, with those of one agent and session counted once. Samples with a gradient of 0 count
    (credit.count_zero_groups).
    """

    aggregation: Literal["token", "sequence", "sequence_sum_constant"] = "token"
    denominator: Literal["all", "agent"] = "all"
    max_tokens: int = 1

    def size(self, num_tokens: int, num_of_session: int) -> float:
        """Return a sample's contribution to the denominator, given its tokens and the number of samples in its session."""
        return {"token": num_tokens, "sequence": 1 / num_of_session, "sequence_sum_constant": self.max_tokens}[
            self.aggregation
        ]


def mini_batches(credited: Credited, number: int, average: Average, *, seed: int, step: int) -> tuple[MiniBatch, ...]:
    """Split one step into at most `number` mini-batches, each an optimizer update, in order.

    The order of groups is drawn from (seed, step). Each group goes to the mini-batch with the fewest samples in the loss's
    denominator. Denominators are computed per mini-batch. A mini-batch without a gradient is dropped; its tokens then count in no
    denominator.
    """
    order = sorted(credited.groups, key=lambda group: group.group_id)
    random.Random(derive_seed(seed, "mini-batches", str(step))).shuffle(order)
    members: list[dict[str, tuple[str, str]]] = [{} for _ in range(number)]  # {uid: (agent, session)}
    for group in order:
        members_of_group = {s.uid: (group.agent, s.session_id) for s in group.samples if s.uid in credited.counted}
        min(members, key=len).update(members_of_group)
    averaged = [_averaged(credited, members_of_group, average) for members_of_group in members]
    return tuple(part for part in averaged if part.sequences) or (MiniBatch((), 0.0),)


def _averaged(credited: Credited, members: Mapping[str, tuple[str, str]], average: Average) -> MiniBatch:
    """Return the samples of these uids as a MiniBatch.

    With credit.denominator=agent each sample's weight contains its agent's denominator; otherwise the MiniBatch has one
    denominator for all samples.

    members: {uid: (agent, session)}.
    """
    num_of = Counter(members.values())
    totals: dict[str, float] = {}  # total denominator of each agent
    for uid, (agent, session) in members.items():
        size = average.size(credited.counted[uid], num_of[agent, session])
        totals[agent] = totals.get(agent, 0) + credited.copies.get(uid, 1) * size

    def weight(sequence: TrainSequence) -> float:
        agent, _ = member = members[sequence.uid]
        of_sample = max(1, credited.counted[sequence.uid]) * num_of[member] if average.aggregation == "sequence" else 1
        of_agent = max(1, totals[agent]) if average.denominator == "agent" else 1
        return credited.copies.get(sequence.uid, 1) / (of_sample * of_agent)

    sequences = tuple(
        replace(sequence, weight=weight(sequence)) for sequence in credited.sequences if sequence.uid in members
    )
    return MiniBatch(sequences, 1.0 if average.denominator == "agent" else float(sum(totals.values())))
