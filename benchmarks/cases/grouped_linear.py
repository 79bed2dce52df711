"""grouped_linear: each expert's linear layer on the expert's rows, forward and backward."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Missing, Shape, Variant, normal
from torch import Tensor

from marsrl.kernels import grouped_linear


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return the shapes; `hidden` is K, the width of the layer's input and of its output."""
    if quick:
        return [Shape(device, tokens=64, hidden=32, experts=4)]
    if device == "cpu":
        return [Shape(device, tokens=2048, hidden=256, experts=8)]
    return [Shape(device, "bfloat16", tokens=tokens, hidden=2048, experts=64) for tokens in (4096, 65536)]


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    x = randn(shape.tokens, shape.hidden).to(dtype).requires_grad_()
    weights = (randn(shape.experts, shape.hidden, shape.hidden) * shape.hidden**-0.5).to(dtype).requires_grad_()
    gradient = randn(shape.tokens, shape.hidden).to(dtype)
    compared, counts = Compared({"dx": x, "dw": weights}, gradient), _counts(shape)
    loop = partial(_loop, counts=counts)
    variants: list[Variant | Missing] = [
        compared.variant("ours", partial(grouped_linear, tokens_per_expert=counts)),
        compared.variant("torch eager", loop, "a loop over the experts"),
    ]
    if dtype != torch.bfloat16 and shape.device == "cuda":
        variants.append(Missing("torch._grouped_mm", "it takes bfloat16 on a GPU"))
    else:
        ends = torch.tensor(counts, device=shape.device).cumsum(0).to(torch.int32)
        layer = lambda x, w: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)  # noqa: E731
        variants.append(compared.variant("torch._grouped_mm", layer))
    flops = 6.0 * shape.tokens * shape.hidden**2
    num_bytes = 2.0 * (x.nbytes + weights.nbytes) + 2 * gradient.nbytes
    return Bench(variants, partial(compared.judge, loop), flops, num_bytes, x.nbytes * 2 + weights.nbytes)


def _counts(shape: Shape) -> list[int]:
    """Return uneven counts of rows that add up to T, as in routing: expert i gets twice the rows of expert i + E / 4."""
    weights = [2.0 ** (-4 * i / shape.experts) for i in range(shape.experts)]
    counts = [int(shape.tokens * weight / sum(weights)) for weight in weights]
    counts[0] += shape.tokens - sum(counts)
    return counts


def _loop(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    return torch.cat([rows @ weight.t() for rows, weight in zip(x.split(counts), weights)])


CASE = Case("grouped_linear", _shapes, _build)
