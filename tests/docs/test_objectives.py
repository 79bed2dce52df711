"""Each config block of docs/credit.md that names a paper has the value and gradient of that paper's formula."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import config_blocks, other_blocks
from letters import sampled
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, policy_loss
from marsrl.rollout.types import Group, Problem
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import read_config
from marsrl.trainer.data.credit import credit
from marsrl.trainer.data.mini_batches import Average, mini_batches
from marsrl.trainer.data.packing import pack

LENGTHS, REWARDS = (3, 5, 2, 4), torch.tensor([1.0, 0.0, 0.5, 0.25], dtype=torch.float64)
NUM = len(LENGTHS)
GRPO = (REWARDS - REWARDS.mean()) / REWARDS.std(correction=0)


def named_blocks() -> dict[str, str]:
    """Return the blocks whose first line ends with a paper's name."""
    found = [(re.match(r".*# (.*), arXiv", block.text), block) for block in config_blocks()]
    return {name[1]: block.text for name, block in found if name and block.where.startswith("docs/credit.md")}


def rloo(logp: list[Tensor], old: list[Tensor], config: RunConfig) -> Tensor:
    """Return the objective of RLOO's equation 8, without KL."""
    others = (REWARDS.sum() - REWARDS) / (NUM - 1)
    sums = torch.stack([own.sum() for own in logp])
    return ((REWARDS - others) * sums).mean() / config.rollout.max_response_tokens


def dr_grpo(logp: list[Tensor], old: list[Tensor], config: RunConfig) -> Tensor:
    """Return the clipped objective with advantages R - mean and a constant length, multiplied by G / (G - 1)."""
    sums = [clipped(p - q, a, 0.2, 0.2).sum() for p, q, a in zip(logp, old, REWARDS - REWARDS.mean(), strict=True)]
    return torch.stack(sums).mean() / config.rollout.max_response_tokens * NUM / (NUM - 1)


def dapo(logp: list[Tensor], old: list[Tensor], config: RunConfig) -> Tensor:
    """Return the objective of DAPO's equation 8."""
    sums = [clipped(p - q, a, 0.2, 0.28).sum() for p, q, a in zip(logp, old, GRPO, strict=True)]
    return torch.stack(sums).sum() / sum(LENGTHS)


def gspo(logp: list[Tensor], old: list[Tensor], config: RunConfig) -> Tensor:
    """Return the objective of GSPO's equations 5 and 7."""
    means = torch.stack([(p - q).mean() for p, q in zip(logp, old, strict=True)])
    return clipped(means, GRPO, 3e-4, 4e-4).mean()


def cispo(logp: list[Tensor], old: list[Tensor], config: RunConfig) -> Tensor:
    """Return the objective of equation 4 of CISPO's paper: the clipped ratio is a weight without gradient."""
    sums = [
        ((p - q).exp().detach().clamp(max=1 + config.loss.clip_high) * a * p).sum()
        for p, q, a in zip(logp, old, GRPO, strict=True)
    ]
    return torch.stack(sums).sum() / sum(LENGTHS)


def clipped(log_ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "RLOO": rloo,
    "Dr. GRPO": dr_grpo,
    "DAPO": dapo,
    "GSPO": gspo,
    "CISPO": cispo,
}


def test_every_named_objective_has_a_block() -> None:
    assert set(named_blocks()) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_block_computes_its_papers_formula(name: str, tmp_path: Path) -> None:
    (tmp_path / "block.yaml").write_text(named_blocks()[name])
    config, _ = read_config(tmp_path / "block.yaml", ["orchestration=solver"])
    assert config.mpt.scope == "off" and config.loss.correction == "none" and config.loss.kl == "none"
    torch.manual_seed(0)
    scale = 3e-3 if name == "GSPO" else 0.3  # log-ratios reach beyond both ends of the clip range
    old = [-torch.rand(n, dtype=torch.float64) - 0.1 for n in LENGTHS]
    logp = [(q + scale * torch.randn(len(q), dtype=torch.float64)).requires_grad_() for q in old]
    if config.loss.old_policy == "pois":
        old = [p.detach() for p in logp]
    objective = FORMULAS[name](logp, old, config)
    expected = torch.cat(torch.autograd.grad(-objective, logp))
    if name != "RLOO":  # RLOO has ratio 1 everywhere, so nothing can be clipped
        assert (expected == 0).any() != (name == "CISPO"), "clipped tokens have no gradient, except in CISPO"
    value, gradient = by_trainer(config, logp, old)
    assert gradient.tolist() == pytest.approx(expected.tolist(), rel=2e-5, abs=1e-9)
    # The logged losses of RLOO and CISPO differ from the formulas in value, not in gradient.
    if name not in ("RLOO", "CISPO"):
        assert value == pytest.approx(-objective.item(), rel=2e-5)


def by_trainer(config: RunConfig, logp: list[Tensor], old: list[Tensor]) -> tuple[float, Tensor]:
    """Return the loss and gradient that the trainer computes with its own credit, mini-batches, packing and kernel."""
    samples = tuple(
        sampled(f"0/solver:{i}", reward, tokens=n) for i, (reward, n) in enumerate(zip(REWARDS.tolist(), LENGTHS))
    )
    credited = credit([Group("0/solver", "0", "solver", samples)], config.credit, config.agents)
    average = Average(config.loss.aggregation, config.credit.denominator, config.rollout.max_response_tokens)
    (update,) = mini_batches(credited, 1, average, seed=0, step=1)
    assert [sequence.uid for sequence in update.sequences] == [sample.uid for sample in samples]
    batch = pack(update.sequences)
    own: set[Any] = {each.name for each in fields(PolicyObjective)}
    settings = config.loss.model_dump(include=own) | {"correction_high": config.loss.upper_bound}
    logprobs = torch.zeros(batch.num_tokens, dtype=torch.float64).masked_scatter(batch.mask, torch.cat(logp).detach())
    logprobs.requires_grad_()
    inputs = LossInputs(
        objective=PolicyObjective(**settings, mpt_probability=None),
        cu_seqlens=batch.cu_seqlens,
        normaliser=update.normaliser,
        advantages=batch.advantages,
        mask=batch.mask,
        agent_of=batch.agent_of,
        num_agents=1,
        old_logprobs=None
        if config.loss.old_policy == "pois"
        else torch.zeros(batch.num_tokens, dtype=torch.float64).masked_scatter(batch.mask, torch.cat(old)),
        rollout_logprobs=batch.rollout_logprobs,
        weights=batch.weights,
    )
    loss = policy_loss(logprobs, torch.zeros_like(logprobs), inputs).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient[batch.mask]


def test_the_toll_of_the_page_is_charged_as_it_says() -> None:
    (block,) = (b.text for b in other_blocks() if b.where.startswith("docs/credit.md:") and b.text.startswith("class"))
    names: dict[str, Any] = {}
    exec(block, names)
    toll = names["Toll"]()
    assert toll.reset(Problem(id="p", question="6 x 7?", answer="42", task="math")) == "6 x 7?"
    assert [toll.step(text) for text in ("a hint!", "It is 42", "41")] == [("It ends in 2.", -0.1), 1.0, 0.0]
