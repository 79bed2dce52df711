"""Lemma 4.2 of Dr. MAS (arXiv:2602.08847) on tabular softmax policies, with the trainer's own advantages.

For an agent k, g = A z with z the score of a call, E over the agent's calls:

    E |g_global|^2 = E |z|^2 (sigma_k^2 + (mu_k - mu)^2) / sigma^2 + Cov(|z|^2, (R - mu)^2 / sigma^2)
    E |g_agent|^2  = E |z|^2                                       + Cov(|z|^2, (R - mu_k)^2 / sigma_k^2)

so that the ratio of the two is drmas/{agent}/variance_inflation where scores and rewards are all but uncorrelated, as here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from letters import group_of

from marsrl.rollout.config import AgentConfig
from marsrl.rollout.types import Group
from marsrl.trainer.config import CreditConfig
from marsrl.trainer.data.credit import credit, drmas_metrics

CALLS = {"solver": 48, "verifier": 96, "corrector": 24}  # of an agent for a prompt
SUCCESS = {"solver": 0.5, "verifier": 0.9, "corrector": 0.15}
PROMPTS, NUM_TOKENS, NUM_ACTIONS, SKEW = 40, 24, 12, 0.5


@pytest.fixture(scope="module")
def played() -> tuple[list[Group], dict[str, float]]:
    """Calls of all agents: groups as the trainer gets them, and |score|^2 of each sample by its uid.

    Every agent has a softmax table of its own, [tokens, actions] logits with a standard deviation of SKEW. The first token
    decides: a call is right where it falls among the agent's likeliest actions that make up its share of successes, as far as
    whole actions can. What the score is of the other tokens is chance.
    """
    generator = torch.Generator().manual_seed(0)
    squared: dict[str, float] = {}
    groups = []
    for prompt, (agent, calls) in itertools.product(range(PROMPTS), CALLS.items()):
        table = (SKEW * torch.randn(NUM_TOKENS, NUM_ACTIONS, generator=generator, dtype=torch.float64)).softmax(-1)
        order = table[0].argsort(descending=True)
        right = order[: max(1, int((table[0][order].cumsum(0) < SUCCESS[agent]).sum()))]
        actions = torch.stack([row.multinomial(calls, replacement=True, generator=generator) for row in table], 1)
        score = torch.nn.functional.one_hot(actions, NUM_ACTIONS) - table  # [calls, tokens, actions], of log pi
        groups.append(group_of(f"{prompt}/{agent}", torch.isin(actions[:, 0], right).tolist(), agent, tokens=1))
        squared |= {
            s.uid: norm for s, norm in zip(groups[-1].samples, score.square().sum((1, 2)).tolist(), strict=True)
        }
    return groups, squared


@pytest.mark.parametrize("agent", CALLS)
def test_a_common_baseline_inflates_the_second_moment_of_the_gradient_as_the_lemma_says(
    played: tuple[list[Group], dict[str, float]], agent: str
) -> None:
    groups, squared = played
    moments = {}
    for normalise in ("global", "agent"):
        rules = CreditConfig.model_validate({"normalise": normalise})
        found = credit(groups, rules, {name: AgentConfig() for name in CALLS}).advantages
        terms = [value**2 * squared[uid] for uid, value in found.items() if f"/{agent}:" in uid]
        assert len(terms) == PROMPTS * CALLS[agent]
        moments[normalise] = sum(terms)
    predicted = drmas_metrics(groups)[f"drmas/{agent}/variance_inflation"]
    assert moments["global"] / moments["agent"] == pytest.approx(predicted, rel=0.05)
    assert abs(predicted - 1) > 0.1  # there is something to predict
