"""The row kernel alone: a chunk of float32 logits to statistics, coefficients and their gradient in place."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from marsrl.benchmarks.case import Bench, Case, Judgement, Results, Shape, Variant
from marsrl.benchmarks.peers.plain import compiled
from marsrl.kernels import PolicyObjective
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.cpu import PolicyTermsOnCpu
from marsrl.kernels.vocabulary import Rows, Statistics, make_head

CHUNK_BYTES = 16 * 2**20  # of logits: larger than the L2 cache, as in use, and small beside a last-level cache


def _shapes(device: str, quick: bool) -> list[Shape]:
    if device != "cpu":
        return []
    vocabularies = (1000,) if quick else (32_000, 151_936)
    return [Shape(device, tokens=CHUNK_BYTES // (4 * vocab), vocab=vocab, sequences=1) for vocab in vocabularies]


def _build(shape: Shape) -> Bench:
    torch.manual_seed(0)
    logits = torch.randn(shape.tokens, shape.vocab) * 2
    targets = torch.randint(shape.vocab, (shape.tokens,))
    advantages = torch.randn(shape.tokens)
    old = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1) + 0.1 * (torch.rand(shape.tokens) - 0.5)
    leaf, buffer = logits.clone().requires_grad_(), torch.empty_like(logits)

    def clear() -> None:
        leaf.grad = None

    variants = [
        Variant("ours", partial(_ours, buffer, targets, advantages, old), prepare=lambda: buffer.copy_(logits)),
        Variant("torch eager", partial(_plain, _eager, leaf, targets, advantages, old), prepare=clear),
        Variant("torch.compile", partial(_plain, compiled(_eager), leaf, targets, advantages, old), prepare=clear),
    ]
    # exp twice, and some 20 operations for its polynomial; what counts is memory: read, and read and written
    flops, num_bytes = 60.0 * logits.numel(), 3.0 * logits.nbytes
    return Bench(variants, [], partial(_judge, logits, targets, advantages, old), flops, num_bytes, 0)


def _ours(buffer: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> Results:
    """The steps of the fused loss between its GEMMs."""
    num_tokens = targets.numel()
    objective = PolicyObjective(mpt_probability=None)
    head = make_head("policy_rows", torch.empty(num_tokens, 1), torch.empty(buffer.shape[1], 1), targets, 1.0, None, None)
    tokens = policy_tokens(
        "policy_rows", num_tokens, buffer.device, objective=objective, advantages=None, token_advantages=advantages,
        mask=None, cu_seqlens=torch.tensor([0, num_tokens]), agent_of=None, num_agents=1, gate=None, old_logprobs=old,
        rollout_logprobs=None, reference_logprobs=None, normaliser=1.0,
    )  # fmt: skip
    rows, statistics = Rows.of(None, num_tokens), Statistics.zeros(num_tokens)
    terms = PolicyTermsOnCpu(objective, tokens, statistics.logprobs, statistics.entropy, None)
    head.statistics(buffer, rows, statistics)
    terms.evaluate(None, 0, num_tokens)
    active = torch.empty(num_tokens, dtype=torch.int64)
    head.gradients_(buffer, rows, statistics, terms.coefficient, terms.entropy_coefficient, active)
    return {"logprobs": statistics.logprobs, "entropy": statistics.entropy, "dz": buffer}


def _eager(logits: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    ratio = torch.exp(chosen - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(), chosen, entropy


def _plain(function, leaf: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> Results:  # type: ignore[no-untyped-def]
    loss, chosen, entropy = function(leaf, targets, advantages, old)
    loss.backward()
    assert leaf.grad is not None
    return {"logprobs": chosen.detach(), "entropy": entropy, "dz": leaf.grad}


def _judge(logits: Tensor, targets: Tensor, advantages: Tensor, old: Tensor) -> Judgement:
    exact = _plain(_eager, logits.double().requires_grad_(), targets, advantages.double(), old.double())
    plain = _plain(_eager, logits.clone().requires_grad_(), targets, advantages, old)
    return Judgement(exact, plain)


CASE = Case("policy_rows", _shapes, _build)
