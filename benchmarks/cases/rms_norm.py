"""rms_norm of hidden states, and of rotated key heads inside a fused projection; forward and backward."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Shape, normal
from head_problem import compiled
from torch import Tensor

from marsrl.kernels import rms_norm

EPS = 1e-6


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return shapes.

    hidden: width N of a row. heads: if the rows are a slice of a fused projection, its number of heads per key head; 0: rows
    are contiguous. note: "rotated" if rows are also rotated by the angles of their token.
    """
    if quick:
        return [Shape(device, tokens=64, hidden=32, heads=5), Shape(device, tokens=64, hidden=33)]
    if device == "cpu":
        return [
            Shape(device, tokens=2048, hidden=256),
            Shape(device, tokens=4096, hidden=32, heads=6),
            Shape(device, tokens=4096, hidden=32, heads=6, note="rotated"),
            Shape(device, tokens=2048, hidden=2048),
            Shape(device, "bfloat16", tokens=2048, hidden=2048),
        ]
    return [
        Shape(device, "bfloat16", tokens=16384, hidden=2048),
        Shape(device, "bfloat16", tokens=65536, hidden=128, heads=10),  # 16,384 tokens, 4 key heads
        Shape(device, "bfloat16", tokens=65536, hidden=128, heads=10, note="rotated"),
    ]


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


def _eager_rotated(x: Tensor, weight: Tensor, rotation: Tensor) -> Tensor:
    """Rotate as transformers does, with cos and sin in the dtype of x, repeated for both columns of each pair."""
    cos, sin = (torch.cat((half, half), -1).to(x.dtype) for half in rotation.chunk(2, -1))
    normed = _eager(x, weight)
    first, second = normed.chunk(2, -1)
    return normed * cos + torch.cat((-second, first), -1) * sin


def _build(shape: Shape) -> Bench:
    randn, dtype = normal(shape), getattr(torch, shape.dtype)
    projection = randn(shape.tokens, (shape.heads or 1) * shape.hidden).to(dtype)
    x = projection[:, -shape.hidden :].requires_grad_()
    weight = randn(shape.hidden).to(dtype).requires_grad_()
    gradient = randn(shape.tokens, shape.hidden).to(dtype)
    compared = Compared({"dx": x, "dw": weight}, gradient)
    rotation, eager = None, _eager
    if shape.note:
        angles = randn(shape.tokens, shape.hidden // 2) * 1000
        rotation = torch.cat((angles.cos(), angles.sin()), -1)
        eager = partial(_eager_rotated, rotation=rotation)
    variants = [
        compared.variant("ours", partial(rms_norm, eps=EPS, rotation=rotation)),
        compared.variant("torch eager", eager),
        compared.variant("torch.compile", compiled(eager)),
    ]
    # For each column, 2 numbers are read or written in the forward, and 3 in the backward.
    num_bytes = 5.0 * gradient.nbytes + (0 if rotation is None else 2 * rotation.nbytes)
    return Bench(variants, partial(compared.judge, eager), 12.0 * gradient.numel(), num_bytes, 2 * gradient.nbytes)


CASE = Case("rms_norm", _shapes, _build)
