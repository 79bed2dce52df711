"""One step of a policy as several optimizer updates (trainer.updates_per_step).

    score every update's micro-batches under the step's starting weights -> update 1 -> update 2 -> ... -> one StepStats

The old policy of all updates is the one before the first, so that ratio and clipping act from the second on. One learning
rate a step, one policy version a step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from functools import reduce
from operator import add

from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.learner import Learner
from marsrl.trainer.learner.step_stats import StepStats


def train_step(
    learner: Learner, updates: Sequence[Update], *, by_agent: bool = False, keep: Collection[str] = ()
) -> StepStats:
    """Do all updates of a step; collective. See `summed` for what the statistics of several say.

    by_agent: measure each agent's share of the gradient (trainer.agent_grad_norm_every).
    keep: uids of samples whose tokens are kept (run.token_log_every); the same on all ranks.
    """
    if len(updates) == 1:
        (only,) = updates
        return learner.step(only.micro_batches, normaliser=only.normaliser, by_agent=by_agent, keep=keep)
    old = [learner.old_policy(update.micro_batches, is_first=i == 0) for i, update in enumerate(updates)]
    last = len(updates) - 1
    return summed(
        [
            learner.step(
                update.micro_batches,
                normaliser=update.normaliser,
                old=each,
                is_last=i == last,
                by_agent=by_agent,
                keep=keep,
            )
            for i, (update, each) in enumerate(zip(updates, old, strict=True))
        ]
    )


def summed(stats: Sequence[StepStats]) -> StepStats:
    """The statistics of a step's updates as one.

    loss, grad_norm, agent_grad_norms: means over the updates that computed something; the share of an agent that an update
    has no token of is 0 there. Counts and sums: added. is_updated, is_skipped: any update changed the weights, was not
    finite. tokens: each with the number of its update. The comparison with the rollout is of the first update alone: the
    weights of later ones have moved on.
    """
    computed = [each for each in stats if not each.is_empty]
    if not computed:
        return stats[0]
    first = computed[0]
    replays = [each.replay for each in computed if each.replay is not None]
    return dataclasses.replace(
        first,
        loss=math.fsum(each.loss for each in computed) / len(computed),
        grad_norm=math.fsum(each.grad_norm for each in computed) / len(computed),
        is_updated=any(each.is_updated for each in computed),
        is_skipped=any(each.is_skipped for each in computed),
        agent_sums={
            name: tuple(map(math.fsum, zip(*(each.agent_sums[name] for each in computed), strict=True)))
            for name in first.agent_sums
        },
        gated_samples=sum(each.gated_samples for each in computed),
        logprobs=tuple(logprobs for each in computed for logprobs in each.logprobs),
        num_updates=sum(each.num_updates for each in computed),
        replay=reduce(add, replays) if replays else None,
        agent_grad_norms=tuple(
            None if set(norms) == {None} else math.fsum(norm or 0.0 for norm in norms) / len(norms)
            for norms in zip(*(each.agent_grad_norms for each in computed), strict=True)
        ),
        tokens=tuple(
            dataclasses.replace(tokens, update=number)
            for number, each in enumerate(stats, start=1)
            for tokens in each.tokens
        ),
    )
