"""pack and kept_rows: inputs of a forward pass over packed sequences, from the concatenated arrays of the samples."""

from __future__ import annotations

from functools import partial

import torch
from case import Bench, Case, Compared, Shape
from torch import Tensor

from cases.attention_varlen import lengths
from marsrl.kernels import kept_rows, pack


def _shapes(device: str, quick: bool) -> list[Shape]:
    """Return the shapes; a quarter of each sequence is its prompt."""
    if quick:
        return [Shape(device, tokens=64, sequences=4)]
    if device == "cpu":
        return [Shape(device, tokens=16384, sequences=64)]
    return [Shape(device, tokens=262144, sequences=256)]


def _build(shape: Shape) -> Bench:
    generator = torch.Generator(shape.device).manual_seed(0)
    sizes = lengths(shape)
    token_ids = torch.randint(0, 151936, (shape.tokens,), dtype=torch.int32, device=shape.device, generator=generator)
    logprobs = -torch.rand(shape.tokens, device=shape.device, generator=generator)
    is_sampled = torch.cat([torch.arange(size, device=shape.device) >= max(1, size // 4) for size in sizes])
    cu_seqlens = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=shape.device)
    num_kept = int(is_sampled.sum())  # known to the host, so that our op does not synchronise

    def ours(logprobs: Tensor) -> Tensor:
        packed = pack(token_ids, is_sampled, cu_seqlens, shape.tokens, logprobs=logprobs)
        kept_rows(packed.mask, num_kept=num_kept)
        assert packed.logprobs is not None
        return packed.logprobs

    def loop(logprobs: Tensor) -> Tensor:
        position_ids, targets = torch.zeros(2, shape.tokens, dtype=torch.int64, device=shape.device)
        packed, mask = torch.zeros_like(logprobs), torch.zeros_like(is_sampled)
        begin = 0
        for size in sizes:
            end = begin + size
            position_ids[begin:end] = torch.arange(size, device=shape.device)
            targets[begin : end - 1] = token_ids[begin + 1 : end]
            mask[begin : end - 1] = is_sampled[begin + 1 : end]
            packed[begin : end - 1] = logprobs[begin + 1 : end].where(is_sampled[begin + 1 : end], 0)
            begin = end
        mask.nonzero()
        return packed

    bytes_read = shape.tokens * (4 + 4 + 1)  # token, log-prob, flag
    bytes_written = shape.tokens * (8 + 8 + 8 + 1 + 4) + 8 * num_kept
    # Nothing is rounded, so one result is enough; tests/kernels/test_packing.py checks the others.
    compared = Compared({"logprobs": logprobs})
    variants = [compared.variant("ours", ours), compared.variant("a loop over sequences", loop)]
    return Bench(variants, partial(compared.judge, loop), 0.0, float(bytes_read + bytes_written), bytes_read)


CASE = Case("packing", _shapes, _build)
