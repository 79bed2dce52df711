"""Inputs, float64 results and lower bound of time for linear_logprob and linear_policy_loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from case import Judgement, Results, Shape, Variant
from torch import Tensor

from marsrl.kernels.head.gemms import cpu_multiplies_bfloat16

PLAIN_ROWS = 4096  # rows per part for plain PyTorch, because the full logits of more rows would not fit
EXACT_BYTES = 2**28  # size of one float64 chunk of logits

Rows = slice | Tensor
# Function of (log-probs [R], entropy [R] or None, rows) that returns the part of the differentiated scalar from these rows.
Objective = Callable[[Tensor, Tensor | None, Rows], Tensor]
LogprobFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Differentiable function of (hidden [T, H], weight [V, H], targets [T]) that returns log-probs [T], and entropy [T] or None."""


def eager_logprob(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-prob of the target and entropy from full logits, like a trainer without kernels."""
    logits = F.linear(hidden, weight)
    logp = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    return chosen, -(logp.exp() * logp).sum(-1)


def eager_logprob_detached(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eager_logprob, but the entropy has no gradient, as for a metric, so less is saved for the backward pass."""
    logp = torch.log_softmax(F.linear(hidden, weight).float(), -1)
    chosen = logp.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return chosen, entropy


@cache
def compiled(function):  # type: ignore[no-untyped-def]
    return torch.compile(function, dynamic=False)


@dataclass(frozen=True)
class HeadInputs:
    """Inputs: hidden [T, H] and weight [V, H], in the shape's dtype, require gradients; others are as in linear_policy_loss.

    Logits are distributed about as N(0, 2), so the entropy is well below log V, as in a trained model. If mask_share is below 1,
    the first half of each sequence (its prompt) is outside the mask. A share active_share / mask_share of the sequences has
    an advantage other than 0.
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
    """Return the inputs, which are equal for every variant and in every process."""
    generator = torch.Generator(shape.device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=shape.device)

    dtype, length = getattr(torch, shape.dtype), shape.tokens // shape.sequences
    hidden = randn(shape.tokens, shape.hidden).to(dtype).requires_grad_()
    weight = (randn(shape.vocab, shape.hidden) * (2 * shape.hidden**-0.5)).to(dtype).requires_grad_()
    targets = torch.randint(shape.vocab, (shape.tokens,), generator=generator, device=shape.device)
    advantages = randn(shape.sequences)
    advantages = torch.where(advantages < 0, advantages - 0.1, advantages + 0.1)  # no advantage is close to 0
    mask = None
    if shape.mask_share < 1:
        mask = torch.arange(shape.tokens, device=shape.device) % length >= length * (1 - shape.mask_share)
        every = round(shape.mask_share / shape.active_share)
        advantages[torch.arange(shape.sequences, device=shape.device) % every != 0] = 0
    # Old log-probs are within 0.1 nats of the current ones, so no ratio is clipped: trained rows with an advantage are active.
    noise = torch.rand(shape.tokens, generator=generator, device=shape.device) * 0.2 - 0.1
    with torch.no_grad():
        parts = [
            eager_logprob(hidden[begin : begin + 512], weight, targets[begin : begin + 512])[0]
            for begin in range(0, shape.tokens, 512)
        ]
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    return HeadInputs(hidden, weight, targets, cu_seqlens, advantages, mask, torch.cat(parts) + noise)


def through_logprobs(
    inputs: HeadInputs, objective: Objective, call: LogprobFunction, kept: Tensor | None = None
) -> Results:
    """Compute the results of a peer that returns log-probs: value (the objective), logprobs, entropy, dX and dW.

    kept: indices of the rows to pass to `call`, including all rows of the mask; None: all rows. The results of other rows are 0.
    """
    rows: Rows = slice(None) if kept is None else kept
    hidden = inputs.hidden if kept is None else inputs.hidden[kept]
    logprobs, entropy = call(hidden, inputs.weight, inputs.targets[rows])
    value = objective(logprobs, entropy, rows)
    value.backward()
    results = {"value": value.detach(), **inputs.gradients()}
    for name, values in (("logprobs", logprobs), ("entropy", entropy)):
        if values is None:
            continue
        values = values.detach().float()
        if kept is not None:
            values = torch.zeros_like(inputs.old_logprobs).index_copy(0, kept, values)
        results[name] = values if inputs.mask is None else values * inputs.mask
    return results


def judge(inputs: HeadInputs, objective: Objective) -> Judgement:
    """Return the results in float64 and by plain PyTorch: value (the differentiated scalar), logprobs, entropy, dX, dW."""
    vocab = inputs.weight.shape[0]
    has_no_target = torch.ones(vocab, dtype=torch.bool, device=inputs.weight.device)
    has_no_target[inputs.targets] = False
    exact = _in_parts(inputs, objective, torch.float64, max(1, EXACT_BYTES // (8 * vocab)))
    return Judgement(exact, _in_parts(inputs, objective, inputs.weight.dtype, PLAIN_ROWS), apart={"dW": has_no_target})


def _in_parts(inputs: HeadInputs, objective: Objective, dtype: torch.dtype, num_rows: int) -> Results:
    """Compute the results by autograd in this dtype, num_rows rows at a time."""
    num_tokens = inputs.targets.numel()
    hidden, weight = inputs.hidden.detach().to(dtype), inputs.weight.detach().to(dtype).requires_grad_()
    of_weight = torch.zeros_like(weight, dtype=torch.promote_types(dtype, torch.float32), requires_grad=False)
    parts = []
    for begin in range(0, num_tokens, num_rows):
        rows = slice(begin, min(begin + num_rows, num_tokens))
        hidden_rows = hidden[rows].requires_grad_()
        logprobs, entropy = eager_logprob(hidden_rows, weight, inputs.targets[rows])
        value = objective(logprobs, entropy, rows)
        of_hidden, of_part = torch.autograd.grad(value, (hidden_rows, weight))
        of_weight += of_part
        parts.append((value.detach(), logprobs.detach(), entropy.detach(), of_hidden))
    values, logprobs_of, entropies, gradients = zip(*parts)
    mask = 1 if inputs.mask is None else inputs.mask
    return {
        "value": torch.stack(values).sum(),
        "logprobs": torch.cat(logprobs_of) * mask,
        "entropy": torch.cat(entropies) * mask,
        "dX": torch.cat(gradients),
        "dW": of_weight.to(dtype),
    }


def floors(inputs: HeadInputs, shape: Shape) -> tuple[list[Variant], str]:
    """Return two variants that compute only the three matrix products, and a sentence about them.

    The first variant, the floor, allocates its results, because each variant must allocate dX and dW. The second variant reuses
    all buffers, which no real variant can. On a CPU the products of bfloat16 input are float32, because float32 statistics are
    required and torch has no CPU product of bfloat16 that returns float32; the input is converted beforehand, which is not timed.
    dX and dW are bfloat16 products if the CPU has instructions for them.
    """
    is_cuda = inputs.hidden.is_cuda
    trained = round(shape.tokens * shape.mask_share)
    active = round(shape.tokens * shape.active_share)
    dtype = inputs.hidden.dtype if is_cuda else torch.float32
    hidden, weight = inputs.hidden.detach()[:trained].to(dtype), inputs.weight.detach().to(dtype)
    is_native = not is_cuda and inputs.hidden.dtype == torch.bfloat16 and cpu_multiplies_bfloat16()
    of_gradients = [tensor.bfloat16() if is_native else tensor for tensor in (hidden[:active], weight)]
    dz = torch.mm(of_gradients[0], of_gradients[1].t())
    buffers: list[Tensor] = []

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
        if not buffers:
            buffers.extend(products(None, None, None))
        products(*buffers)
        return {}

    which = "of the trained rows (logits) and of the active rows (dX, dW)" if shape.mask_share < 1 else "of all rows"
    sentence = f"floor: the three bare GEMMs {which}, {str(dtype).removeprefix('torch.')} in and out, results allocated"
    if not is_cuda and inputs.hidden.dtype != dtype:
        sentence += "; the bfloat16 input was converted beforehand and is not counted"
    if is_native:
        sentence += "; dX and dW are products of bfloat16, in this CPU's own instructions"
    ways = (("three GEMMs (the floor)", run), ("three GEMMs, all buffers there", run_in_place))
    return [Variant(name, way, "no softmax, no loss") for name, way in ways], sentence


def head_flops(shape: Shape) -> float:
    """Return the FLOPs, (2m + 4a) THV: logits of the trained rows (share m), dX and dW of the active rows (share a)."""
    return (2 * shape.mask_share + 4 * shape.active_share) * shape.tokens * shape.hidden * shape.vocab


def result_bytes(inputs: HeadInputs) -> int:
    """Return the size of dX and dW in bytes, in the dtype of the input."""
    return inputs.hidden.nbytes + inputs.weight.nbytes


def head_bytes(inputs: HeadInputs) -> float:
    """Return the minimum bytes: hidden, weight, dX and dW, and target, old log-prob, log-prob and entropy per token."""
    return 2 * result_bytes(inputs) + inputs.targets.numel() * (8 + 3 * 4)


def head_shapes(device: str, quick: bool, *, with_masks: bool) -> list[Shape]:
    """Return the shapes: small ones for a CPU thread; for a GPU, the head of a 1-2B model, whole and in parallel shards."""
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
