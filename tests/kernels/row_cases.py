"""Rows that are hard for a softmax, and sums that must not mix, on the device that is the default."""

from dataclasses import replace

import torch
from fused_head import policy_loss
from torch import Tensor

from marsrl.kernels import PolicyObjective
from marsrl.kernels.head.vocabulary import Head, make_head


def head_for(
    targets: Tensor, width: int, num_columns: int, first_column: int = 0, temperature: Tensor | float = 1.0
) -> Head:
    hidden = torch.zeros(targets.numel(), 1)
    head = make_head("case", hidden, torch.zeros(width, 1), targets, temperature, None, None)
    return replace(head, num_columns=num_columns, first_column=first_column)


def exact_statistics(z: Tensor, targets: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax(z * inverse[:, None], dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * torch.where(logp.isinf(), 0, logp)).sum(-1)


def hard_rows(columns: int) -> Tensor:
    """[6, columns] float32: usual, large, peaked at the first and at the last column, flat, one column at -inf."""
    rows = torch.randn(6, columns)
    rows[1] *= 100
    rows[2, 0] += 60
    rows[3, -1] += 200
    rows[4] = 88.0
    if columns > 1:
        rows[5, columns // 2] = -torch.inf
    return rows


def check_many_agents() -> None:
    """More agents than a block has kinds of, and tokens in several blocks: the sums of each are its own."""
    num_tokens, num_agents = 700, 40
    agent_of = torch.randint(0, num_agents, (num_tokens,))
    logprobs, entropy = -torch.rand(num_tokens), torch.rand(num_tokens)
    advantages = torch.randn(num_tokens)
    result = policy_loss(
        logprobs,
        entropy,
        objective=PolicyObjective(),
        advantages=advantages,
        cu_seqlens=torch.arange(num_tokens + 1),
        agent_of=agent_of,
        num_agents=num_agents,
        normaliser=2.0,
    )
    exact = torch.zeros(num_agents, dtype=torch.float64).index_add_(0, agent_of, -advantages.double() / 2)
    torch.testing.assert_close(result.agent_sums["loss"].double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(result.agent_sums["tokens"], agent_of.bincount(minlength=num_agents).float())
