"""A step of one policy, or of several at once: adapters of one base share micro-batches.

    for group in groups(learners, agents):            # of a run: Together((solver, verifier), ...), Together((other,), ...)
        updates = scatter(joined(...), group.shard(max_tokens))
        stats = group.train_step(updates)              # {policy: StepStats}

Each policy's update equals the one it would make alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marsrl.trainer.data.scatter import BatchShard, Update
from marsrl.trainer.learner.learner import Learner, take_step
from marsrl.trainer.learner.step_stats import StepStats

if TYPE_CHECKING:  # it imports megatron
    from marsrl.trainer.learner.megatron.passes import Passes


@dataclass(frozen=True)
class Together:
    """Policies that share micro-batches, by name.

    agents: of each policy. adapters: index of each agent's policy; (): a single policy.
    """

    learners: Mapping[str, Learner]
    agents: tuple[frozenset[int] | None, ...]
    passes: Passes
    adapters: tuple[int, ...] = ()

    def shard(self, max_tokens: int) -> BatchShard:
        """This rank's share of their batch, as Learner.shard."""
        first, *others = self.learners.values()
        is_apart = bool(others) and any(each.has_experts for each in (first, *others))
        return dataclasses.replace(first.shard(max_tokens), adapters=self.adapters, is_apart=is_apart)

    def train_step(
        self, updates: Sequence[Update], *, by_agent: bool = False, keep: Collection[str] = ()
    ) -> dict[str, StepStats]:
        """Learner.train_step of each policy. Collective."""
        learners = self.learners.values()
        steps = [each.step_of(agents=own) for each, own in zip(learners, self.agents, strict=True)]
        stats = take_step(steps, self.passes, updates, by_agent=by_agent, keep=keep)
        return dict(zip(self.learners, stats, strict=True))


def groups(learners: Mapping[str, Learner], policy_of: Sequence[str]) -> list[Together]:
    """Group the policies that train together, in order. policy_of: the policy of each agent of the run."""
    found: list[dict[str, Learner]] = []
    for name, learner in learners.items():
        of = (group for group in found if next(iter(group.values())).passes.can_join(learner.passes))
        group = next(of, None)
        if group is None:
            found.append({name: learner})
        else:
            group[name] = learner
    return [_together(group, policy_of) for group in found]


def _together(group: dict[str, Learner], policy_of: Sequence[str]) -> Together:
    names, (first, *others) = list(group), group.values()
    if not others:
        return Together(group, (None,), first.passes)
    agents = tuple(frozenset(i for i, policy in enumerate(policy_of) if policy == name) for name in names)
    places = tuple(names.index(policy) if policy in names else 0 for policy in policy_of)
    return Together(group, agents, first.passes.joined([each.passes for each in others], places), places)
