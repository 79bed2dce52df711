"""mpt_gate: the mean entropy of each positive sample against a threshold."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Judgement, Results, Shape, Variant, normal
from torch import Tensor

from marsrl.kernels import mpt_gate

THRESHOLD = 0.8


def _shapes(device: str, quick: bool) -> list[Shape]:
    sizes = (256,) if quick else (256, 16384, 65536)
    return [Shape(device, tokens=tokens, sequences=tokens // 64, mask_share=0.5, active_share=0.5) for tokens in sizes]


def _build(shape: Shape) -> Bench:
    length = shape.tokens // shape.sequences
    entropy = normal(shape)(shape.tokens).abs()
    mask = torch.arange(shape.tokens, device=shape.device) % length >= length // 2
    cu_seqlens = torch.arange(0, shape.tokens + 1, length, dtype=torch.int32, device=shape.device)
    positive = torch.arange(shape.sequences, device=shape.device) % 2 == 0

    def ours() -> Results:
        return {"gate": mpt_gate(entropy, mask, cu_seqlens, positive, entropy_threshold=THRESHOLD).float()}

    def judge() -> Judgement:
        exact = _eager(entropy.double(), mask, cu_seqlens, positive)["gate"].double()
        return Judgement({"gate": exact}, {"gate": exact})

    variants = [
        Variant("ours", ours),
        Variant("torch eager", partial(_eager, entropy, mask, cu_seqlens, positive)),
        Variant("a loop over samples", partial(_loop, entropy, mask, cu_seqlens, positive)),
    ]
    return Bench(variants, [], judge, 2.0 * shape.tokens, shape.tokens * 5.0 + shape.sequences * 6, shape.sequences)


def _eager(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor, positive: Tensor) -> Results:
    sample_of = torch.repeat_interleave(cu_seqlens.diff().long(), output_size=entropy.numel())
    zeros = torch.zeros(positive.numel(), dtype=entropy.dtype, device=entropy.device)
    total = zeros.index_add(0, sample_of, entropy * mask)
    count = zeros.index_add(0, sample_of, mask.to(entropy.dtype))
    return {"gate": (positive & (total < THRESHOLD * count)).float()}


def _loop(entropy: Tensor, mask: Tensor, cu_seqlens: Tensor, positive: Tensor) -> Results:
    bounds, gates = cu_seqlens.tolist(), []
    for s, is_positive in enumerate(positive.tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        gates.append(is_positive and bool(entropy[rows][mask[rows]].mean() < THRESHOLD))
    return {"gate": torch.tensor(gates, device=entropy.device).float()}


CASE = Case("mpt_gate", _shapes, _build)
