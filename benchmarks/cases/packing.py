"""pack, unpack, compact: rows of hidden states between padded, packed and kept layouts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from marsrl.benchmarks.case import Bench, Case, Judgement, Results, Shape, Variant
from marsrl.benchmarks.cases.attention_varlen import lengths
from marsrl.kernels import compact, pack, unpack

OPS = ("pack", "unpack", "compact")


def _shapes(device: str, quick: bool) -> list[Shape]:
    """note: the op. Half of the rows are kept by compact."""
    if quick:
        return [Shape(device, tokens=64, hidden=16, sequences=4, note=op) for op in OPS]
    if device == "cpu":
        return [Shape(device, tokens=8192, hidden=256, sequences=32, note=op) for op in OPS]
    return [Shape(device, "bfloat16", tokens=65536, hidden=2048, sequences=64, note=op) for op in OPS]


def _build(shape: Shape) -> Bench:
    generator = torch.Generator(shape.device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    sizes = lengths(shape)
    longest = max(sizes)
    of_sequence = torch.tensor(sizes, device=shape.device)
    cu_seqlens = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device=shape.device)
    is_token = torch.arange(longest, device=shape.device) < of_sequence[:, None]  # [S, L]
    is_kept = torch.rand(shape.tokens, generator=generator, device=shape.device) < 0.5
    num_kept = int(is_kept.sum())
    packed, padded = (shape.tokens, shape.hidden), (shape.sequences, longest, shape.hidden)
    # the host knows the counts: on a GPU no variant of ours waits for them
    jobs: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Callable[[Tensor], Tensor]]]] = {
        "pack": (
            padded,
            packed,
            {
                "ours": lambda rows: pack(rows, of_sequence, num_tokens=shape.tokens).values,
                "torch eager": lambda rows: rows[is_token],
                "a loop over sequences": lambda rows: torch.cat([row[:size] for row, size in zip(rows, sizes)]),
            },
        ),
        "unpack": (
            packed,
            padded,
            {
                "ours": lambda rows: unpack(rows, cu_seqlens, max_length=longest),
                "torch eager": lambda rows: rows.new_zeros(padded).masked_scatter(is_token[:, :, None], rows),
                "torch pad_sequence": lambda rows: torch.nn.utils.rnn.pad_sequence(
                    list(rows.split(sizes)), batch_first=True
                ),
            },
        ),
        "compact": (
            packed,
            (num_kept, shape.hidden),
            {
                "ours": lambda rows: compact(rows, is_kept, num_kept=num_kept).values,
                "torch eager": lambda rows: rows[is_kept],
            },
        ),
    }
    given, returned, ways = jobs[shape.note]
    rows = torch.randn(*given, generator=generator, device=shape.device).to(dtype).requires_grad_()
    gradient = torch.randn(*returned, generator=generator, device=shape.device).to(dtype)

    def clear() -> None:
        rows.grad = None

    def run(way: Callable[[Tensor], Tensor]) -> Results:
        out = way(rows)
        out.backward(gradient)
        assert rows.grad is not None
        return {"out": out.detach(), "gradient": rows.grad}

    def judge() -> Judgement:
        clear()
        plain = run(ways["torch eager"])  # bits are copied: there is nothing to round
        return Judgement({name: values.double() for name, values in plain.items()}, plain)

    variants = [replace(Variant(name, partial(run, way)), prepare=clear) for name, way in ways.items()]
    moved = min(rows.numel(), gradient.numel()) * rows.element_size()
    num_bytes = 2.0 * moved + rows.nbytes + gradient.nbytes  # each way: what is moved is read, all of a result written
    return Bench(variants, [], judge, 0.0, num_bytes, rows.nbytes + gradient.nbytes)


CASE = Case("packing", _shapes, _build)
