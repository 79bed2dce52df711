"""swiglu: the activation of experts, with the router's weights, and of dense layers, without weights; forward and backward."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Shape, normal
from head_problem import compiled
from torch import Tensor
from torch.nn.functional import silu

from marsrl.kernels import swiglu


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return the shapes; `hidden` is F, the width of an expert or a dense layer. experts: number of experts; 0: a dense layer."""
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


def _eager(products: Tensor, weights: Tensor | None = None) -> Tensor:
    gate, up = products.chunk(2, dim=-1)
    out = silu(gate) * up
    return (out if weights is None else out * weights.unsqueeze(-1)).to(products.dtype)


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    leaves = {"dx": randn(shape.tokens, 2 * shape.hidden).to(dtype).requires_grad_()}
    if shape.experts:
        leaves["dw"] = randn(shape.tokens).sigmoid().requires_grad_()
    gradient = randn(shape.tokens, shape.hidden).to(dtype)
    compared = Compared(leaves, gradient)
    variants = [
        compared.variant("ours", swiglu),
        compared.variant("torch eager", _eager),
        compared.variant("torch.compile", compiled(_eager)),
    ]
    # For each column, 3 numbers are read or written in the forward, and 5 in the backward.
    num_bytes, result_bytes = 8.0 * gradient.nbytes, leaves["dx"].nbytes + gradient.nbytes
    return Bench(variants, partial(compared.judge, _eager), 30.0 * gradient.numel(), num_bytes, result_bytes)


CASE = Case("swiglu", _shapes, _build)
