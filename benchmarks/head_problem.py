"""Inputs, float64 results and floor of the two ops that go from hidden states to log-probs or to the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from case import Judgement, Results, Shape, Variant
from peers.plain import eager_logprob
from torch import Tensor

from marsrl.kernels.head.gemms import cpu_multiplies_bfloat16

PLAIN_ROWS = 4096  # plain PyTorch judges larger batches in parts: its full logits would not fit
EXACT_BYTES = 2**28  # of one float64 chunk of logits

# Adds up what a part of the rows contributes to the scalar that is differentiated: (log-probs [R], entropy [R], rows).
Objective = Callable[[Tensor, Tensor, slice], Tensor]


@dataclass(frozen=True)
class HeadInputs:
    """hidden [T, H] and weight [V, H], leaves at the shape's dtype; the rest as linear_policy_loss takes it.

    Logits are about N(0, 2): the entropy is well under log V, as in a trained model. The first half of each sequence
    (its prompt) is outside the mask where mask_share is below 1; of the sequences, active_share / mask_share have an
    advantage.
    """

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    mask: Tensor | None
    old_logprobs: Tensor

    @property
    def num_trained(self) -> int:
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages.repeat_interleave(self.targets.numel() // self.advantages.numel())

    def clear(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def gradients(self) -> Results:
        assert self.hidden.grad is not None and self.weight.grad is not None
        return {"dX": self.hidden.grad, "dW": self.weight.grad}


def make_inputs(shape: Shape) -> HeadInputs:
    """The same numbers for every variant and in every process."""
    generator = torch.Generator(shape.device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=shape.device)

    dtype, length = getattr(torch, shape.dtype), shape.tokens // shape.sequences
    hidden = randn(shape.tokens, shape.hidden).to(dtype).requires_grad_()
    weight = (randn(shape.vocab, shape.hidden) * (2 * shape.hidden**-0.5)).to(dtype).requires_grad_()
    targets = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=shape.device)
    advantages = randn(shape.sequences)
    advantages = torch.where(advantages < 0, advantages - 0.1, advantages + 0.1)  # none is 0 by chance
    mask = None
    if shape.mask_share < 1:
        mask = torch.arange(shape.tokens, device=shape.device) % length >= length * (1 - shape.mask_share)
        every = round(shape.mask_share / shape.active_share)
        advantages[torch.arange(shape.sequences, device=shape.device) % every != 0] = 0
    # within 0.1 nats of the current ones, so that no ratio leaves the clip range: every trained row is active
    noise = torch.rand(shape.tokens, generator=generator, device=shape.device) * 0.2 - 0.1
    with torch.no_grad():
        parts = [
            eager_logprob(hidden[begin : begin + 512], weight, targets[begin : begin + 512])[0]
            for begin in range(0, shape.tokens, 512)
        ]
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    return HeadInputs(hidden, weight, targets, cu_seqlens, advantages, mask, torch.cat(parts) + noise)


def judge(inputs: HeadInputs, objective: Objective) -> Judgement:
    """float64 results and plain PyTorch's: value (the scalar), logprobs, entropy, dX, dW."""
    has_no_target = torch.ones(inputs.weight.shape[0], dtype=torch.bool, device=inputs.weight.device)
    has_no_target[inputs.targets] = False
    return Judgement(_exact(inputs, objective), _plain(inputs, objective), apart={"dW": has_no_target})


def _exact(inputs: HeadInputs, objective: Objective) -> Results:
    """Closed form in chunks of rows: dz_v = c (1[v = y] - p_v) - e p_v (log p_v + H), c and e by autograd."""
    hidden, weight = inputs.hidden.detach().double(), inputs.weight.detach().double()
    num_tokens, vocab = hidden.shape[0], weight.shape[0]
    step = max(1, EXACT_BYTES // (8 * vocab))
    value = torch.zeros((), dtype=torch.float64, device=hidden.device)
    logprobs, entropy = hidden.new_empty(num_tokens), hidden.new_empty(num_tokens)
    of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    for begin in range(0, num_tokens, step):
        rows = slice(begin, min(begin + step, num_tokens))
        logp = torch.log_softmax(hidden[rows] @ weight.t(), -1)
        at = inputs.targets[rows, None]
        chosen = logp.gather(1, at).squeeze(1).requires_grad_()
        ent = -(logp.exp() * logp).sum(-1)
        ent.requires_grad_()
        part = objective(chosen, ent, rows)
        c, e = torch.autograd.grad(part, (chosen, ent), allow_unused=True)
        e = torch.zeros_like(ent) if e is None else e
        value += part.detach()
        logprobs[rows], entropy[rows] = chosen.detach(), ent.detach()
        dz = logp.exp().mul_(-(c[:, None] + e[:, None] * (logp + ent.detach()[:, None])))
        dz.scatter_add_(1, at, c[:, None])
        of_hidden[rows] = dz @ weight
        of_weight.addmm_(dz.t(), hidden[rows])
    return {"value": value, "logprobs": logprobs, "entropy": entropy, "dX": of_hidden, "dW": of_weight}


def _plain(inputs: HeadInputs, objective: Objective) -> Results:
    num_tokens = inputs.targets.numel()
    values, logprobs, entropies, of_hidden = [], [], [], []
    of_weight: Tensor | None = None
    for begin in range(0, num_tokens, PLAIN_ROWS):
        rows = slice(begin, min(begin + PLAIN_ROWS, num_tokens))
        hidden = inputs.hidden.detach()[rows].requires_grad_()
        weight = inputs.weight.detach().requires_grad_()
        chosen, entropy = eager_logprob(hidden, weight, inputs.targets[rows])
        value = objective(chosen, entropy, rows)
        value.backward()
        assert hidden.grad is not None and weight.grad is not None
        values.append(value.detach())
        logprobs.append(chosen.detach())
        entropies.append(entropy.detach())
        of_hidden.append(hidden.grad)
        of_weight = weight.grad.float() if of_weight is None else of_weight.add_(weight.grad)
    assert of_weight is not None
    return {
        "value": torch.stack(values).sum(),
        "logprobs": torch.cat(logprobs),
        "entropy": torch.cat(entropies),
        "dX": torch.cat(of_hidden),
        "dW": of_weight.to(inputs.weight.dtype),
    }


FLOOR = "three GEMMs (the floor)"


def floors(inputs: HeadInputs, shape: Shape) -> tuple[list[Variant], str]:
    """The job's three matrix products alone, and a sentence about them.

    The floor allocates its results, as each variant must allocate dX and dW; the second variant finds all its buffers
    in place, which no variant can. CPU: float32 products. bfloat16 input is converted beforehand, uncounted: torch has
    no CPU product of bfloat16 that returns float32, and float32 statistics are mandatory. dX and dW, which are bfloat16
    themselves, are products of bfloat16 where the CPU has instructions for them.
    """
    is_cuda = inputs.hidden.is_cuda
    trained = round(shape.tokens * shape.mask_share)
    active = round(shape.tokens * shape.active_share)
    dtype = inputs.hidden.dtype if is_cuda else torch.float32
    hidden, weight = inputs.hidden.detach()[:trained].to(dtype), inputs.weight.detach().to(dtype)
    is_native = not is_cuda and inputs.hidden.dtype == torch.bfloat16 and cpu_multiplies_bfloat16()
    of_gradients = [each.bfloat16() if is_native else each for each in (hidden[:active], weight)]
    dz = torch.mm(of_gradients[0], of_gradients[1].t())
    kept: list[Tensor] = []

    def products(logits: Tensor | None, of_hidden: Tensor | None, of_weight: Tensor | None) -> list[Tensor]:
        return [
            torch.mm(hidden, weight.t(), out=logits),
            torch.mm(dz, of_gradients[1], out=of_hidden),
            torch.mm(dz.t(), of_gradients[0], out=of_weight),
        ]

    def run() -> Results:
        products(None, None, None)
        return {}

    def run_in_place() -> Results:
        if not kept:
            kept.extend(products(None, None, None))
        products(*kept)
        return {}

    which = "of the trained rows (logits) and of the active rows (dX, dW)" if shape.mask_share < 1 else "of all rows"
    sentence = f"floor: the three bare GEMMs {which}, {str(dtype).removeprefix('torch.')} in and out, results allocated"
    if not is_cuda and inputs.hidden.dtype != dtype:
        sentence += "; the bfloat16 input was converted beforehand and is not counted"
    if is_native:
        sentence += "; dX and dW are products of bfloat16, in this CPU's own instructions"
    does = "no softmax, no loss"
    return [Variant(FLOOR, run, does), Variant("three GEMMs, all buffers there", run_in_place, does)], sentence


def head_flops(shape: Shape) -> float:
    """(2m + 4a) THV: logits of the trained rows, dX and dW of the active ones."""
    return (2 * shape.mask_share + 4 * shape.active_share) * shape.tokens * shape.hidden * shape.vocab


def result_bytes(inputs: HeadInputs) -> int:
    """Bytes of dX and dW at the dtype of the input."""
    return inputs.hidden.nbytes + inputs.weight.nbytes


def head_bytes(inputs: HeadInputs) -> float:
    """hidden and weight read, dX and dW written, once each; per token target, old log-prob, log-prob and entropy."""
    return 2 * result_bytes(inputs) + inputs.targets.numel() * (8 + 3 * 4)


def head_shapes(device: str, quick: bool, *, with_masks: bool) -> list[Shape]:
    """CPU: small enough for one thread. GPU: the sizes of a 1-2B model's head, whole and as tensor-parallel shards."""
    if quick:
        sizes = [Shape(device, "float32", tokens=64, hidden=32, vocab=1000, sequences=4)]
    elif device == "cpu":
        sizes = [
            Shape(device, dtype, tokens=256, hidden=256, vocab=vocab, sequences=8)
            for dtype in ("float32", "bfloat16")
            for vocab in (32_000, 151_936)
        ]
    else:
        sizes = [
            Shape(device, "bfloat16", tokens=tokens, hidden=2048, vocab=151_936, sequences=tokens // 512)
            for tokens in (1024, 4096, 16384, 65536)
        ]
        sizes += [
            Shape(device, "bfloat16", tokens=16384, hidden=2048, vocab=151_936 // ranks, sequences=32,
                  note=f"the vocabulary shard of {ranks} tensor-parallel ranks")
            for ranks in (2, 4)
        ]  # fmt: skip
    if not with_masks:
        return sizes
    half = [
        Shape(**{**vars(shape), "mask_share": 0.5, "active_share": 0.25})
        for shape in sizes
        if not shape.note and (device == "cpu" or shape.tokens >= 16384)
    ]
    return sizes + half
