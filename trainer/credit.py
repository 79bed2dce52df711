"""Which sample gets how much credit: advantages from groups of rewards, and what enters the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from marsrl.kernels import group_advantage
from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group, Reward, Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.packing import TrainSequence


@dataclass(frozen=True, slots=True)
class Credited:
    """The samples that train one policy in one step.

    sequences: those with a gradient. num_tokens: the denominator of the loss, over all samples consumed (algorithms:
    sampled tokens of trained agents with a reward; zero-spread groups count when credit.count_zero_groups).
    advantages: of every sample that was credited, by uid, for the samples log.
    counted: the tokens of each sample in num_tokens, by uid.
    """

    sequences: tuple[TrainSequence, ...]
    num_tokens: int
    advantages: Mapping[str, float]
    metrics: Mapping[str, float]
    counted: Mapping[str, int]


def credit(
    groups: Sequence[Group],
    config: CreditConfig,
    agents: Mapping[str, AgentConfig],
    *,
    keep_zero: bool = False,
) -> Credited:
    """Advantages of all samples, and the sequences that enter packing.

    Args:
        groups: finished groups of agents that one policy answers.
        agents: every agent of the team in order; a sequence's agent index is its place here.
        keep_zero: keep samples with advantage 0 (a KL term or an entropy bonus still gives them a gradient).

    A sample without a reward is in no statistic, no sequence and no denominator. An advantage of exactly 0 (a group
    without spread, a singleton) leaves the sample out of packing.
    """
    names = list(agents)
    trained = [g for g in groups if config.train_agents == "all" or g.agent in config.train_agents]
    if config.reward_scheme == "outcome":
        trained = outcome_rewards(trained, groups)
    samples = [s for g in trained for s in g.samples]
    if not samples:
        return Credited((), 0, {}, {}, {})
    instances = _indices(s.rollout_id for s in samples)
    advantage = group_advantage(
        torch.tensor([s.reward.value for s in samples], dtype=torch.float32),
        torch.tensor(_indices(s.group_id for s in samples)),
        torch.tensor([names.index(s.agent) for s in samples]),
        torch.tensor(instances),
        normalise=config.normalise,
        std=config.std,
        singleton=config.singleton,
    ).tolist()
    sequences = []
    counted: dict[str, int] = {}
    for sample, value in zip(samples, advantage, strict=True):
        if sample.reward.is_missing:
            continue
        enters = value != 0.0 or keep_zero
        if enters or config.count_zero_groups:
            counted[sample.uid] = int(sample.is_sampled.sum())
        if enters:
            agent = agents[sample.agent]
            sequences.append(
                TrainSequence(
                    uid=sample.uid,
                    prompt_ids=sample.prompt_ids,
                    token_ids=sample.token_ids,
                    is_sampled=sample.is_sampled,
                    rollout_logprobs=sample.rollout_logprobs,
                    advantage=value * agent.loss_weight,
                    agent=names.index(sample.agent),
                    temperature=agent.temperature,
                    is_positive=sample.reward.correct >= 1,
                    routed_experts=sample.routed_experts,
                )
            )
    by_uid = {s.uid: v for s, v in zip(samples, advantage, strict=True) if not s.reward.is_missing}
    num_tokens = sum(counted.values())
    return Credited(tuple(sequences), num_tokens, by_uid, variance_inflation(trained), counted)


def outcome_rewards(trained: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """The same groups with every reward replaced by the outcome: the mean final correctness over the leaves below.

    A leaf is a sample that no other sample answers. A Solver's or Corrector's leaf counts its own correctness, a verdict
    that of the solution judged, which is its parent. The ablation that MarsRL argues against.
    """
    by_uid: dict[str | None, Sample] = {s.uid: s for g in groups for s in g.samples}
    children: dict[str | None, list[Sample]] = {}
    for sample in by_uid.values():
        children.setdefault(sample.parent_uid, []).append(sample)

    def own(sample: Sample) -> float:
        judged = by_uid.get(sample.parent_uid) if sample.verdict is not None else None
        return judged.reward.correct if judged is not None else sample.reward.correct

    def leaves(sample: Sample) -> list[float]:
        below = children.get(sample.uid, [])
        return [value for child in below for value in leaves(child)] if below else [own(sample)]

    def outcome(sample: Sample) -> Sample:
        known = [value for value in leaves(sample) if not math.isnan(value)]
        value = sum(known) / len(known) if known else math.nan
        return replace(sample, reward=Reward(value, sample.reward.correct, {"outcome": value}))

    return [replace(g, samples=tuple(outcome(s) for s in g.samples)) for g in trained]


def _indices(names: Iterable[str]) -> list[int]:
    """Each name as the index of its first appearance."""
    seen: dict[str, int] = {}
    return [seen.setdefault(name, len(seen)) for name in names]


def variance_inflation(groups: Sequence[Group]) -> dict[str, float]:
    """drmas/{agent}/variance_inflation: (sigma_k^2 + (mu_k - mu)^2) / sigma^2 (Dr. MAS, arXiv:2602.08847).

    What the second moment of agent k's gradient would gain under one baseline for all agents; 1 = nothing.
    """
    rewards = {
        agent: [s.reward.value for g in groups if g.agent == agent for s in g.samples if not s.reward.is_missing]
        for agent in sorted({g.agent for g in groups})
    }
    known = [r for values in rewards.values() for r in values]
    if len(set(known)) < 2:
        return {}
    everything = torch.tensor(known, dtype=torch.float64)
    metrics = {}
    for agent, values in rewards.items():
        if values:
            own = torch.tensor(values, dtype=torch.float64)
            inflation = (own.var(correction=0) + (own.mean() - everything.mean()) ** 2) / everything.var(correction=0)
            metrics[f"drmas/{agent}/variance_inflation"] = inflation.item()
    return metrics
