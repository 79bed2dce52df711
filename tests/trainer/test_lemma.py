"""Lemma 4.2 of Dr. MAS (arXiv:2602.08847) on tabular softmax policies, with the trainer's own advantages.

For an agent k, g = A z with z the score of a call, E over the agent's calls:

    E |g_global|^2 = E |z|^2 (sigma_k^2 + (mu_k - mu)^2) / sigma^2 + Cov(|z|^2, (R - mu)^2 / sigma^2)
    E |g_agent|^2  = E |z|^2                                       + Cov(|z|^2, (R - mu_k)^2 / sigma_k^2)

so that the ratio of the two is drmas/{agent}/variance_inflation where scores and rewards are all but uncorrelated, as here.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from letters import group_of
from torch import Tensor

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit, drmas_metrics

CALLS = {"solver": 48, "verifier": 96, "corrector": 24}  # of an agent for a prompt
SUCCESS = {"solver": 0.5, "verifier": 0.9, "corrector": 0.15}
PROMPTS, NUM_TOKENS, NUM_ACTIONS, SKEW = 40, 24, 12, 0.5


@dataclass(frozen=True)
class Played:
    """Calls of all agents: groups as the trainer gets them, and |score|^2 of each sample by its uid."""

    groups: list[Group]
    squared_scores: dict[str, float]


def play() -> Played:
    """Every agent has a softmax table of its own, [tokens, actions] logits with a standard deviation of SKEW.

    The first token decides: a call is right where it falls among the agent's likeliest actions that make up its share of
    successes, as far as whole actions can. What the score is of the other tokens is chance.
    """
    generator = torch.Generator().manual_seed(0)
    squared: dict[str, float] = {}
    groups = []
    for prompt in range(PROMPTS):
        for agent, calls in CALLS.items():
            logits = SKEW * torch.randn(NUM_TOKENS, NUM_ACTIONS, generator=generator, dtype=torch.float64)
            table = logits.softmax(-1)
            order = table[0].argsort(descending=True)
            is_right = torch.zeros(NUM_ACTIONS, dtype=torch.bool)
            is_right[order[: max(1, int((table[0][order].cumsum(0) < SUCCESS[agent]).sum()))]] = True
            actions = torch.stack([row.multinomial(calls, replacement=True, generator=generator) for row in table], 1)
            score = torch.nn.functional.one_hot(actions, NUM_ACTIONS) - table  # [calls, tokens, actions], of log pi
            rewards = is_right[actions[:, 0]].double().tolist()
            name = f"{prompt}/{agent}"
            for i, norm in enumerate(score.square().sum((1, 2)).tolist()):
                squared[f"{name}:{i}"] = norm
            groups.append(group_of(name, rewards, agent, tokens=1))
    return Played(groups, squared)


def second_moment(played: Played, agent: str, normalise: str) -> Tensor:
    """Mean of A^2 |z|^2 over the agent's calls."""
    agents = {name: AgentConfig() for name in CALLS}
    found = credit(played.groups, CreditConfig(normalise=normalise), agents).advantages  # type: ignore[arg-type]
    terms = [value**2 * played.squared_scores[uid] for uid, value in found.items() if f"/{agent}:" in uid]
    assert len(terms) == PROMPTS * CALLS[agent]
    return torch.tensor(terms, dtype=torch.float64).mean()


@pytest.fixture(scope="module")
def long_calls() -> Played:
    return play()


@pytest.mark.parametrize("agent", CALLS)
def test_a_common_baseline_inflates_the_second_moment_of_the_gradient_as_the_lemma_says(
    long_calls: Played, agent: str
) -> None:
    predicted = drmas_metrics(long_calls.groups)[f"drmas/{agent}/variance_inflation"]
    measured = second_moment(long_calls, agent, "global") / second_moment(long_calls, agent, "agent")
    assert measured == pytest.approx(predicted, rel=0.05)
    assert abs(predicted - 1) > 0.1  # there is something to predict
