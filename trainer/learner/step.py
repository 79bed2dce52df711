"""One step of a policy, or of several that share micro-batches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from marsrl.trainer.data.scatter import Update
from marsrl.trainer.learner.step_stats import StepStats, empty_update, summed, update_stats
from marsrl.trainer.machine import training_device

if TYPE_CHECKING:  # they import megatron
    from marsrl.trainer.learner.megatron.optimizer import Optimizer
    from marsrl.trainer.learner.megatron.passes import Passes, Work


@dataclass(frozen=True)
class PolicyStep:
    """A policy's part in a step. agents: its own among those of the run; None: all."""

    optimizer: Optimizer
    lr: float
    agents: frozenset[int] | None = None


def take_step(
    policies: Sequence[PolicyStep],
    passes: Passes,
    updates: Sequence[Update],
    *,
    by_agent: bool = False,
    keep: Collection[str] = (),
) -> list[StepStats]:
    """Learner.train_step of several policies: the statistics of each. Collective.

    Each has its own norm, clipping, learning rate and optimizer. An update without trained tokens of a policy
    leaves it unchanged.
    """
    works = [passes.prepare(update, is_first=i == 0) for i, update in enumerate(updates)]
    stats: list[list[StepStats]] = [[] for _ in policies]
    for work in works:
        if not work.micro_batches:
            for found, policy in zip(stats, policies, strict=True):
                found.append(empty_update(work.num_agents, policy.lr))
            continue
        norms = _agent_grad_norms(policies, passes, work) if by_agent else [()] * len(policies)
        for policy in policies:
            policy.optimizer.zero_grad()
        results, replay = passes.forward_backward(work)
        for i, policy in enumerate(policies):
            grad_norm = policy.optimizer.grad_norm()
            update = update_stats(
                work,
                results,
                grad_norm=grad_norm,
                lr=policy.lr,
                replay=replay,
                agent_grad_norms=norms[i],
                keep=frozenset(keep),
                agents=policy.agents,
            )
            if update.is_updated:
                policy.optimizer.apply(grad_norm, policy.lr)
            stats[i].append(update)
    return [summed(each) for each in stats]


def _agent_grad_norms(policies: Sequence[PolicyStep], passes: Passes, work: Work) -> list[tuple[float | None, ...]]:
    """Each policy's gradient norms by agent, over all ranks, by a forward and backward pass per agent; None for an agent without
    a trained token, or of another policy.

    Leaves the last agent's gradients behind.
    """
    counts = torch.zeros(work.num_agents, dtype=torch.int64, device=training_device())
    for each in work.micro_batches:
        batch = each.cut.batch
        counts += batch.of_tokens(batch.agent_of)[batch.trained_rows].bincount(minlength=work.num_agents)
    dist.all_reduce(counts)
    norms: list[list[float | None]] = [[None] * work.num_agents for _ in policies]
    for agent, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        for policy in policies:
            policy.optimizer.zero_grad()
        passes.forward_backward(work, agent)
        for policy, found in zip(policies, norms, strict=True):
            if policy.agents is None or agent in policy.agents:
                found[agent] = policy.optimizer.grad_norm()
    return [tuple(found) for found in norms]
