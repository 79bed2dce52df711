"""head_gemms: each of the head's three products alone, at the rows of its chunks, ours beside a bare torch.mm."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Judgement, Missing, Results, Shape, Variant, normal
from torch import Tensor

from marsrl.kernels.head.gemms import HeadGemms
from marsrl.kernels.head.rows.protocol import RowKernels, Statistics
from marsrl.kernels.head.rows.providers import ROW_PROVIDERS
from marsrl.kernels.head.rows.subset import Rows
from marsrl.kernels.head.vocabulary import make_head

LOGITS, OF_HIDDEN, OF_WEIGHT = "logits", "dX", "dW"
ROUNDED = "its result is rounded to the input's dtype"


def _shapes(device: str, quick: bool) -> list[Shape]:
    """note: which product. On a GPU the rows of a chunk of logits, those of dz, and 32 tiles of 132 multiprocessors."""
    if quick:
        sizes = [Shape(device, tokens=64, hidden=32, vocab=1000)]
    elif device == "cpu":
        sizes = [Shape(device, tokens=128, hidden=256, vocab=32_000)]
    else:
        sizes = [Shape(device, "bfloat16", tokens=tokens, hidden=2048, vocab=151_936) for tokens in (768, 3072, 4224)]
    return [Shape(**{**vars(shape), "note": product}) for shape in sizes for product in (LOGITS, OF_HIDDEN, OF_WEIGHT)]


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    hidden = randn(shape.tokens, shape.hidden).to(dtype)
    weight = (randn(shape.vocab, shape.hidden) * shape.hidden**-0.5).to(dtype)
    if shape.note == LOGITS:
        return _bench(shape, _of_logits(hidden, weight), hidden, weight.t(), 1)
    gemms = HeadGemms(weight, dtype)
    dz = randn(shape.tokens, shape.vocab).to(dtype).to(gemms.gradient_dtype)
    if shape.note == OF_HIDDEN:
        ours = Variant("ours", lambda: {OF_HIDDEN: gemms.hidden_gradient(dz)})
        return _bench(shape, [ours], dz, weight, 1)
    total = torch.zeros(weight.shape, device=shape.device)

    def add() -> Results:
        return {OF_WEIGHT: gemms.add_weight_gradient(total, dz, hidden)}

    return _bench(shape, [Variant("ours", add, "adds to a float32 sum", total.zero_)], dz.t(), hidden, 2)


def _of_logits(hidden: Tensor, weight: Tensor) -> list[Variant | Missing]:
    """The product alone, and with the row kernel that reads it."""
    gemms, rows = HeadGemms(weight, hidden.dtype), Rows.of(None, hidden.shape[0])
    targets = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    head = make_head("head_gemms", hidden, weight, targets, 1.0)
    logits = torch.empty(hidden.shape[0], weight.shape[0], device=hidden.device)
    statistics = Statistics.zeros(hidden.shape[0], hidden.device)

    def product() -> Results:
        gemms.logits(hidden, logits)
        return {LOGITS: logits}

    def then_statistics(kernels: RowKernels) -> Results:
        results = product()
        kernels.statistics(logits, rows, head, statistics)
        return results

    candidates: list[Variant | Missing] = [Variant("ours", product)]
    for provider in ROW_PROVIDERS:
        name = f"ours, {provider.name}, with statistics"
        reason = provider.machine_lacks() or provider.why_not(hidden=hidden, weight=weight)
        if reason is None:
            candidates.append(Variant(name, partial(then_statistics, provider.load())))
        else:
            candidates.append(Missing(name, reason))
    return candidates


def _bench(
    shape: Shape, ours: list[Variant | Missing] | list[Variant], left: Tensor, right: Tensor, passes: int
) -> Bench:
    """The comparison of ours, of left @ right, its float32 result moved so many times, and torch.mm beside ours."""
    dtype = getattr(torch, shape.dtype)
    left, right = left.to(dtype), right.to(dtype)
    out = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    does = "" if dtype == torch.float32 else ROUNDED
    candidates = [*ours, Variant("torch.mm", lambda: {shape.note: torch.mm(left, right, out=out)}, does)]

    def judge() -> Judgement:
        return Judgement({shape.note: left.double() @ right.double()}, {shape.note: left @ right})

    num_bytes = left.nbytes + right.nbytes + passes * 4 * out.numel()
    return Bench(candidates, judge, 2.0 * shape.tokens * shape.hidden * shape.vocab, num_bytes, 0)


CASE = Case("head_gemms", _shapes, _build)
