"""swiglu: the activation of experts with the router's weights, and of a dense layer without; forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from case import Bench, Case, Judgement, Results, Shape, Variant, results_of
from peers.plain import compiled
from torch import Tensor
from torch.nn.functional import silu

from marsrl.kernels import swiglu


def _shapes(device: str, quick: bool) -> list[Shape]:
    """hidden: F, the width of an expert or of the layer. experts: of the first kind, 0: a dense layer."""
    if quick:
        return [Shape(device, tokens=64, hidden=33, experts=4), Shape(device, tokens=64, hidden=32)]
    if device == "cpu":
        return [
            Shape(device, tokens=256, hidden=352, experts=8),
            Shape(device, tokens=4096, hidden=352, experts=8),
            Shape(device, "bfloat16", tokens=4096, hidden=768, experts=8),
            Shape(device, tokens=1024, hidden=3072),
        ]
    return [
        Shape(device, "bfloat16", tokens=131072, hidden=768, experts=128),  # 16,384 tokens, 8 experts each
        Shape(device, "bfloat16", tokens=16384, hidden=12288),
    ]


def _eager(products: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = products.chunk(2, dim=-1)
    out = silu(gate) * up
    return (out if weights is None else out * weights.unsqueeze(-1)).to(products.dtype)


def _build(shape: Shape) -> Bench:
    generator = torch.Generator(shape.device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=shape.device)

    products = randn(shape.tokens, 2 * shape.hidden).to(dtype).requires_grad_()
    weights = randn(shape.tokens).sigmoid().requires_grad_() if shape.experts else None
    gradient = randn(shape.tokens, shape.hidden).to(dtype)

    def clear() -> None:
        for each in (products, weights):
            if each is not None:
                each.grad = None

    def results(out: Tensor, rows: Tensor, shares: Tensor | None) -> Results:
        return results_of(out, {"dx": rows} | ({} if shares is None else {"dw": shares}))

    def run(activation: Callable[[Tensor, Tensor | None], Tensor]) -> Results:
        out = activation(products, weights)
        out.backward(gradient)
        return results(out, products, weights)

    def judge() -> Judgement:
        def judged(dtype: torch.dtype) -> Results:
            rows = products.detach().to(dtype).requires_grad_()
            wide = torch.promote_types(dtype, torch.float32)
            shares = None if weights is None else weights.detach().to(wide).requires_grad_()
            out = _eager(rows, shares)
            out.backward(gradient.to(dtype))
            return results(out, rows, shares)

        return Judgement(judged(torch.float64), judged(dtype))

    variants = [
        Variant("ours", partial(run, swiglu)),
        Variant("torch eager", partial(run, _eager)),
        Variant("torch.compile", partial(run, compiled(_eager))),
    ]
    variants = [replace(variant, prepare=clear) for variant in variants]
    # read and written once each: forward 3 numbers of a column, backward 5
    num_bytes = 8.0 * gradient.nbytes
    return Bench(variants, [], judge, 30.0 * gradient.numel(), num_bytes, products.nbytes + gradient.nbytes)


CASE = Case("swiglu", _shapes, _build)
