"""policy_loss: the clipped loss of given log-probs, with sums per agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from case import Bench, Case, Compared, Judgement, Shape, normal
from head_problem import compiled
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective, policy_loss

NUM_AGENTS = 5
FORWARD = "forward alone"
OBJECTIVE = PolicyObjective(clip_high=0.28, correction="tis", correction_high=2.0, mpt_probability=None)


def _shapes(device: str, quick: bool) -> list[Shape]:
    sizes = ((256, ""),) if quick else ((256, ""), (256, FORWARD), (16384, ""), (65536, ""))
    return [
        Shape(device, tokens=tokens, sequences=tokens // 64, mask_share=0.5, active_share=0.5, note=note)
        for tokens, note in sizes
    ]


def _build(shape: Shape) -> Bench:
    randn = normal(shape)
    logprobs = -randn(shape.tokens).abs()
    entropy = randn(shape.tokens).abs()
    old, rollout = (logprobs + 0.3 * randn(shape.tokens) for _ in range(2))
    length = shape.tokens // shape.sequences
    mask = torch.arange(shape.tokens, device=shape.device) % length >= length // 2
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    advantages = randn(shape.sequences)
    agent_of = torch.arange(shape.sequences, device=shape.device) % NUM_AGENTS
    total = float(mask.sum())
    constants = (entropy, old, rollout, advantages, mask, agent_of, total)
    gradient = None if shape.note == FORWARD else torch.ones((), device=shape.device)
    compared = Compared({"gradient": logprobs.requires_grad_(gradient is not None)}, gradient, ("loss", "agent loss"))

    def ours(logprobs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = LossInputs(
            objective=OBJECTIVE, advantages=advantages, mask=mask, cu_seqlens=cu_seqlens, agent_of=agent_of,
            num_agents=NUM_AGENTS, old_logprobs=old, rollout_logprobs=rollout, normaliser=total,
        )  # fmt: skip
        out = policy_loss(logprobs, entropy, inputs)
        return out.loss, out.agent_sums["loss"]

    def plain(function: Callable[..., tuple[Tensor, Tensor]], logprobs: Tensor) -> tuple[Tensor, Tensor]:
        loss, sums = function(logprobs, *constants)
        return loss, sums[0]

    def judge() -> Judgement:
        size = float(advantages.abs().mean())  # size of the terms, as their sum nearly cancels
        return replace(compared.judge(partial(plain, _eager)), scales={"loss": size, "agent loss": size})

    variants = [
        compared.variant("ours", ours),
        compared.variant("torch eager", partial(plain, _eager)),
        compared.variant("torch.compile", partial(plain, compiled(_eager))),
    ]
    # For each token, 4 numbers and the mask are read, and the coefficient is written.
    return Bench(variants, judge, 20.0 * shape.tokens, shape.tokens * (5 * 4 + 1), logprobs.nbytes)


def _eager(
    logprobs: Tensor, entropy: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor,
    agent_of: Tensor, total: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the loss, and the metrics per agent that a trainer logs."""
    old, rollout = old.to(logprobs.dtype), rollout.to(logprobs.dtype)
    length = logprobs.numel() // advantages.numel()
    of_token, agent = advantages.repeat_interleave(length), agent_of.repeat_interleave(length)
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
    weight = torch.exp(old - rollout).clamp(max=OBJECTIVE.correction_high)
    term = -weight * torch.minimum(ratio * of_token, clipped * of_token) * mask / total
    with torch.no_grad():
        is_clipped = (clipped != ratio) & mask
        sums = torch.zeros(4, NUM_AGENTS, dtype=term.dtype, device=term.device)
        metrics = torch.stack([values.to(term.dtype) for values in (term, is_clipped, entropy * mask, mask)])
        sums.index_add_(1, agent, metrics)
    return term.sum(), sums


CASE = Case("policy_loss", _shapes, _build)
