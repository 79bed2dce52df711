"""policy_loss: the clipped loss with tokens per agent, on given log-probs."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Judgement, Results, Shape, Variant, normal
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
    logprobs = (-randn(shape.tokens).abs()).requires_grad_()
    entropy = randn(shape.tokens).abs()
    old, rollout = (logprobs.detach() + 0.3 * randn(shape.tokens) for _ in range(2))
    length = shape.tokens // shape.sequences
    mask = torch.arange(shape.tokens, device=shape.device) % length >= length // 2
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    advantages = randn(shape.sequences)
    agent_of = torch.arange(shape.sequences, device=shape.device) % NUM_AGENTS
    total = float(mask.sum())
    given = (entropy, old, rollout, advantages, mask, agent_of)
    has_backward = shape.note != FORWARD
    if not has_backward:
        logprobs.requires_grad_(False)

    def clear() -> None:
        logprobs.grad = None

    def ours() -> Results:
        inputs = LossInputs(
            objective=OBJECTIVE, advantages=advantages, mask=mask, cu_seqlens=cu_seqlens, agent_of=agent_of,
            num_agents=NUM_AGENTS, old_logprobs=old, rollout_logprobs=rollout, normaliser=total,
        )  # fmt: skip
        out = policy_loss(logprobs, entropy, inputs)
        return _results(out.loss, out.agent_sums["loss"], logprobs)

    def judge() -> Judgement:
        exact = _plain(
            _eager, logprobs.detach().double().requires_grad_(has_backward), tuple(map(_double, given)), total
        )
        plain = _plain(_eager, logprobs.detach().clone().requires_grad_(has_backward), given, total)
        size = float(advantages.abs().mean())  # of the terms; their sum nearly cancels
        return Judgement(exact, plain, {"loss": size, "agent loss": size})

    variants = [
        Variant("ours", ours, prepare=clear),
        Variant("torch eager", partial(_plain, _eager, logprobs, given, total), prepare=clear),
        Variant("torch.compile", partial(_plain, compiled(_eager), logprobs, given, total), prepare=clear),
    ]
    # read: 4 numbers and the mask of a token; written: coefficient
    return Bench(variants, judge, 20.0 * shape.tokens, shape.tokens * (5 * 4 + 1), logprobs.nbytes)


def _double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


def _eager(
    logprobs: Tensor, entropy: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor,
    agent_of: Tensor, total: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and the metrics per agent that a trainer logs."""
    length = logprobs.numel() // advantages.numel()
    of_token, agent = advantages.repeat_interleave(length), agent_of.repeat_interleave(length)
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - OBJECTIVE.clip_low, 1 + OBJECTIVE.clip_high)
    weight = torch.exp(old - rollout).clamp(max=OBJECTIVE.correction_high)
    term = -weight * torch.minimum(ratio * of_token, clipped * of_token) * mask / total
    with torch.no_grad():
        is_clipped = (clipped != ratio) & mask
        sums = torch.zeros(4, NUM_AGENTS, dtype=term.dtype, device=term.device)
        metrics = torch.stack((term, is_clipped.to(term.dtype), entropy * mask, mask.to(term.dtype)))
        sums.index_add_(1, agent, metrics)
    return term.sum(), sums


def _plain(function, logprobs: Tensor, given: tuple[Tensor, ...], total: float) -> Results:  # type: ignore[no-untyped-def]
    loss, sums = function(logprobs, *given, total)
    return _results(loss, sums[0], logprobs)


def _results(loss: Tensor, of_agents: Tensor, logprobs: Tensor) -> Results:
    """With the gradient, where logprobs require one."""
    results = {"loss": loss.detach(), "agent loss": of_agents}
    if logprobs.requires_grad:
        loss.backward()
        assert logprobs.grad is not None
        results["gradient"] = logprobs.grad
    return results


CASE = Case("policy_loss", _shapes, _build)
