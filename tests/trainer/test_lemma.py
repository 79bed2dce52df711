"""Lemma 4.2 of Dr. MAS (arXiv:2602.08847) on tabular softmax policies, with the trainer's own advantages.

For an agent k, g = A z with z the score of a call, E over the agent's calls:

    E |g_global|^2 = E |z|^2 (sigma_k^2 + (mu_k - mu)^2) / sigma^2 + Cov(|z|^2, (R - mu)^2 / sigma^2)
    E |g_agent|^2  = E |z|^2                                       + Cov(|z|^2, (R - mu_k)^2 / sigma_k^2)

so that the ratio of the two is drmas/{agent}/variance_inflation where scores and rewards are all but uncorrelated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from letters import bare
from torch import Tensor

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group, Reward, Sample
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit, drmas_metrics

CALLS = {"solver": 48, "verifier": 96, "corrector": 24}  # of an agent for a prompt
SUCCESS = {"solver": 0.5, "verifier": 0.9, "corrector": 0.15}
PROMPTS = 40


@dataclass(frozen=True)
class Played:
    """Calls of all agents: groups as the trainer gets them, and |score|^2 of each sample by its uid."""

    groups: list[Group]
    squared_scores: dict[str, float]


def play(num_tokens: int, num_actions: int, skew: float) -> Played:
    """Every agent has a softmax table of its own, [tokens, actions] logits with a standard deviation of `skew`.

    The first token decides: a call is right where it falls among the agent's likeliest actions that make up its share of
    successes, as far as whole actions can. What the score is of the other tokens is chance.
    """
    generator = torch.Generator().manual_seed(0)
    squared: dict[str, float] = {}
    groups = []
    for prompt in range(PROMPTS):
        for agent, calls in CALLS.items():
            logits = skew * torch.randn(num_tokens, num_actions, generator=generator, dtype=torch.float64)
            table = logits.softmax(-1)
            order = table[0].argsort(descending=True)
            is_right = torch.zeros(num_actions, dtype=torch.bool)
            is_right[order[: max(1, int((table[0][order].cumsum(0) < SUCCESS[agent]).sum()))]] = True
            actions = torch.stack([row.multinomial(calls, replacement=True, generator=generator) for row in table], 1)
            score = torch.nn.functional.one_hot(actions, num_actions) - table  # [calls, tokens, actions], of log pi
            rewards = is_right[actions[:, 0]].double().tolist()
            name = f"{prompt}/{agent}"
            for i, norm in enumerate(score.square().sum((1, 2)).tolist()):
                squared[f"{name}:{i}"] = norm
            groups.append(
                Group(name, str(prompt), agent, tuple(call(name, i, agent, r) for i, r in enumerate(rewards)))
            )
    return Played(groups, squared)


def call(name: str, index: int, agent: str, reward: float) -> Sample:
    made = bare(
        f"{name}:{index}", agent, group_id=name, rollout_id=name.partition("/")[0], reward=Reward(reward, reward)
    )
    return replace(made, token_ids=np.zeros(1, np.int32), is_sampled=np.ones(1, bool))


def second_moment(played: Played, agent: str, normalise: str) -> Tensor:
    """Mean of A^2 |z|^2 over the agent's calls."""
    agents = {name: AgentConfig() for name in CALLS}
    found = credit(played.groups, CreditConfig(normalise=normalise), agents).advantages  # type: ignore[arg-type]
    terms = [value**2 * played.squared_scores[uid] for uid, value in found.items() if f"/{agent}:" in uid]
    assert len(terms) == PROMPTS * CALLS[agent]
    return torch.tensor(terms, dtype=torch.float64).mean()


@pytest.fixture(scope="module")
def long_calls() -> Played:
    return play(num_tokens=24, num_actions=12, skew=0.5)


@pytest.mark.parametrize("agent", CALLS)
def test_a_common_baseline_inflates_the_second_moment_of_the_gradient_as_the_lemma_says(
    long_calls: Played, agent: str
) -> None:
    predicted = drmas_metrics(long_calls.groups)[f"drmas/{agent}/variance_inflation"]
    measured = second_moment(long_calls, agent, "global") / second_moment(long_calls, agent, "agent")
    assert measured == pytest.approx(predicted, rel=0.05)
    assert abs(predicted - 1) > 0.1  # there is something to predict


def test_where_scores_and_rewards_correlate_the_ratio_departs_by_the_lemmas_covariance() -> None:
    """One token of few actions: what is likely is right and has a small score, so that failures weigh more."""
    played = play(num_tokens=1, num_actions=5, skew=1.0)
    agent = "verifier"
    predicted = drmas_metrics(played.groups)[f"drmas/{agent}/variance_inflation"]
    measured = second_moment(played, agent, "global") / second_moment(played, agent, "agent")
    assert abs(measured / predicted - 1) > 0.1
    squares: dict[str, list[float]] = {"global": [], "agent": []}  # (R - mean)^2 / variance, without the trainer's code
    norms = []
    for prompt in range(PROMPTS):
        groups = [group for group in played.groups if group.rollout_id == str(prompt)]
        of = {group.agent: [s.reward.value for s in group.samples] for group in groups}
        for name, rewards in (("global", [reward for each in of.values() for reward in each]), ("agent", of[agent])):
            mean, variance = np.mean(rewards), np.var(rewards)
            squares[name] += [(r - mean) ** 2 / variance if variance else 0.0 for r in of[agent]]
        norms += [played.squared_scores[f"{prompt}/{agent}:{i}"] for i in range(CALLS[agent])]
    with_covariance = [
        np.mean(norms) * np.mean(squares[name]) + np.cov(norms, squares[name], bias=True)[0, 1] for name in squares
    ]
    assert measured == pytest.approx(with_covariance[0] / with_covariance[1], rel=1e-4)  # credit adds 1e-6 to sigma
