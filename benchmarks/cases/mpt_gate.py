"""mpt_gate: comparison of each positive sample's mean entropy with a threshold."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Shape, normal
from torch import Tensor

from marsrl.kernels import mpt_gate

THRESHOLD = 0.8


def _shapes(device: str, quick: bool) -> list[Shape]:
    sizes = (256,) if quick else (256, 16384, 65536)
    return [Shape(device, tokens=tokens, sequences=tokens // 64, mask_share=0.5, active_share=0.5) for tokens in sizes]


def _build(shape: Shape) -> Bench:
    length = shape.tokens // shape.sequences
    mask = torch.arange(shape.tokens, device=shape.device) % length >= length // 2
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    positive = torch.arange(shape.sequences, device=shape.device) % 2 == 0
    compared, constants = Compared({"entropy": normal(shape)(shape.tokens).abs()}), (mask, cu_seqlens, positive)
    eager = lambda entropy: _eager(entropy, *constants)  # noqa: E731
    variants = [
        compared.variant("ours", lambda entropy: mpt_gate(entropy, *constants, entropy_threshold=THRESHOLD).float()),
        compared.variant("torch eager", eager),
        compared.variant("a loop over samples", lambda entropy: _loop(entropy, *constants)),
    ]
    num_bytes = shape.tokens * 5.0 + shape.sequences * 6
    return Bench(variants, partial(compared.judge, eager), 2.0 * shape.tokens, num_bytes, shape.sequences)


def _eager(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor, positive: Tensor) -> Tensor:
    sample_of = torch.repeat_interleave(cu_seqlens.diff().long(), output_size=entropy.numel())
    zeros = torch.zeros(positive.numel(), dtype=entropy.dtype, device=entropy.device)
    total = zeros.index_add(0, sample_of, entropy * mask)
    count = zeros.index_add(0, sample_of, mask.to(entropy.dtype))
    return (positive & (total < THRESHOLD * count)).to(entropy.dtype)


def _loop(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor, positive: Tensor) -> Tensor:
    bounds, gates = cu_seqlens.tolist(), []
    for s, is_positive in enumerate(positive.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        gates.append(is_positive and bool(entropy[rows][mask[rows]].mean() < THRESHOLD))
    return torch.tensor(gates, device=entropy.device).float()


CASE = Case("mpt_gate", _shapes, _build)
