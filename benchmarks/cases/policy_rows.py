"""policy_rows: the row kernel alone, from a chunk of float32 logits to statistics, coefficients and gradients in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from case import Bench, Case, Compared, Judgement, Missing, Results, Shape, Variant
from head_problem import compiled
from torch import Tensor

from marsrl.kernels import LossInputs, PolicyObjective
from marsrl.kernels.head.rows.protocol import RowKernels, Slopes, Statistics
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import make_head
from marsrl.kernels.policy_loss.arguments import policy_tokens
from marsrl.kernels.policy_loss.terms import policy_terms

GPU_CHUNK_BYTES = 448 * 2**20  # bytes of a chunk of logits on a GPU, as in the fused loss
CHUNK_BYTES = 4 * 2**20  # the same on a CPU: more than an L2 cache, far less than a last-level cache


def _shapes(device: str, quick: bool) -> list[Shape]:
    if quick:
        return [Shape(device, tokens=64, vocab=1000, sequences=1)]
    bonus = "with an entropy bonus"
    chunk = CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES
    return [
        Shape(device, tokens=chunk // (4 * vocab), vocab=vocab, sequences=1, note=note)
        for vocab in (32_000, 151_936)
        for note in ("", bonus)
    ]


def _build(shape: Shape) -> Bench:
    generator = torch.Generator(shape.device).manual_seed(0)
    logits = torch.randn(shape.tokens, shape.vocab, generator=generator, device=shape.device) * 2
    targets = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=shape.device)
    advantages = torch.randn(shape.tokens, generator=generator, device=shape.device)
    noise = torch.rand(shape.tokens, generator=generator, device=shape.device) * 0.1 - 0.05
    old = torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1) + noise
    bonus = 0.01 if shape.note else 0.0
    constants = (targets, advantages, old, bonus)
    unit = torch.ones((), device=shape.device)
    compared = Compared({"dz": logits.clone().requires_grad_()}, unit, ("loss", "logprobs", "entropy"))

    def plain(function: Callable[..., tuple[Tensor, ...]], logits: Tensor) -> tuple[Tensor, ...]:
        return function(logits, *constants)

    def judge() -> Judgement:
        judgement = compared.judge(partial(plain, _eager))
        # The ratio is exp of a float32 log-prob, so its error is up to |log-prob| ulp. The target's dz is proportional to the
        # ratio.
        size = float(judgement.exact["dz"].abs().max() * judgement.exact["logprobs"].abs().max())
        return replace(judgement, scales={"dz": size, "loss": float(advantages.abs().sum())})

    variants: list[Variant | Missing] = []
    for provider in ROW_PROVIDERS:
        reason = provider.machine_lacks() or provider.why_not(logits=logits)
        if reason is not None:
            variants.append(Missing(f"ours, {provider.name}", reason))
            continue
        name = f"ours, {provider.name}" if any(variant.name == "ours" for variant in variants) else "ours"
        ours = _Ours(provider.load(), logits, *constants)
        variants.append(Variant(name, ours.run, "" if name != "ours" else provider.name, prepare=ours.fill))
    variants += [
        compared.variant("torch eager", partial(plain, _eager)),
        compared.variant("torch.compile", partial(plain, compiled(_eager))),
    ]
    # Each logit needs two exponentials of about 20 operations each. Memory is the bottleneck: logits are read twice and written
    # once.
    flops, num_bytes = 60.0 * logits.numel(), 3.0 * logits.nbytes
    return Bench(variants, judge, flops, num_bytes, 0)


class _Ours:
    """Our variant: the steps of the fused loss between its GEMMs, on buffers that are reused."""

    def __init__(
        self, kernels: RowKernels, logits: Tensor, targets: Tensor, advantages: Tensor, old: Tensor, bonus: float
    ):
        num_tokens, vocab = logits.shape
        device = logits.device
        self.kernels, self.source, self.logits = kernels, logits, torch.empty_like(logits)
        self.out = self.logits if kernels.is_host else torch.empty_like(logits)
        self.active = torch.empty(num_tokens, dtype=torch.int64, device=device)
        # This head has hidden size 1: it carries targets and temperature, and its GEMMs are not called.
        rows, weight = torch.empty(num_tokens, 1, device=device), torch.empty(vocab, 1, device=device)
        self.head = make_head("policy_rows", rows, weight, targets, 1.0)
        objective = PolicyObjective(mpt_probability=None, entropy_coef=bonus)
        bounds = torch.tensor([0, num_tokens], device=device)
        inputs = LossInputs(objective, bounds, 1.0, token_advantages=advantages, old_logprobs=old)
        self.tokens = policy_tokens("policy_rows", num_tokens, device, inputs)

    def fill(self) -> None:
        """Restore the logits, allocate per-token arrays and set up the objective's evaluator: work that `run` does not time."""
        self.logits.copy_(self.source)
        statistics = self.statistics = Statistics.zeros(self.active.numel(), self.logits.device)
        self.terms = policy_terms(self.kernels, self.tokens, statistics.logprobs, statistics.entropy)

    def run(self) -> Results:
        rows, statistics, terms = Rows.of(None, self.active.numel()), self.statistics, self.terms
        if terms.in_one_walk is not None:
            terms.in_one_walk(self.logits, rows, self.head, statistics, self.out, self.active).wait()
        else:
            self.kernels.statistics(self.logits, rows, self.head, statistics)
            terms.evaluate(rows)
            slopes = Slopes(statistics, terms.coefficient, terms.entropy_coefficient)
            self.kernels.gradients(self.logits, rows, self.head, slopes, self.out, self.active).wait()
        return {"logprobs": statistics.logprobs, "entropy": statistics.entropy, "dz": self.out}


def _eager(
    logits: Tensor, targets: Tensor, advantages: Tensor, old: Tensor, bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    logp = torch.log_softmax(logits, -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    if bonus:
        entropy = -(logp.exp() * logp).sum(-1)
    else:
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
    ratio = torch.exp(chosen - old)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate + bonus * entropy).sum(), chosen, entropy


CASE = Case("policy_rows", _shapes, _build)
