"""Which part of every HF tensor an engine shard holds, and where in its fused tensors (fused_layout.py) it lies.

A tensor-parallel shard `part` of `parts`, as vLLM cuts a Qwen2.5 / Qwen3 / Qwen3-MoE model:

    q, gate, up (of every expert)        a share of the rows
    k, v                                 a share of the rows, whole heads; with fewer heads than shards they are repeated
    o_proj, down_proj                    a share of the columns
    embed_tokens, lm_head                a share of the rows, the vocabulary rounded up to a multiple of 64
    norms, router                        all of it

Our local engine and a vLLM engine on one GPU are the shard 0 of 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from marsrl.rollout.weights.bucket_plan import Box, whole_box
from marsrl.rollout.weights.fused_layout import fusion_plan

_VOCAB_MULTIPLE = 64  # vLLM's padding of the vocabulary
_ROWS = (".q_proj.weight", ".q_proj.bias", ".gate_proj.weight", ".up_proj.weight")
_KV_ROWS = (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")
_COLUMNS = (".o_proj.weight", ".down_proj.weight")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard keeps its box of an HF tensor: from `row` on in `fused` seen as a matrix [.., last dimension]; a
    vector is one column."""

    fused: str
    row: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """needs: its box of each HF tensor. places: where that box lies (a tied embedding lies in two fused tensors).
    shapes: of its fused tensors."""

    needs: Mapping[str, Box]
    places: Mapping[str, tuple[Place, ...]]
    shapes: Mapping[str, tuple[int, ...]]


def shard_layout(
    shapes: Mapping[str, tuple[int, ...]], *, num_kv_heads: int, part: int = 0, parts: int = 1
) -> ShardLayout:
    """The layout of shard `part` of `parts`, of a model whose HF tensors have these shapes.

    Raises:
        ValueError: a dimension cannot be cut into so many parts.
    """
    needs = {name: _need(name, shape, num_kv_heads, part, parts) for name, shape in shapes.items()}
    places: dict[str, list[Place]] = defaultdict(list)
    fused_shapes: dict[str, tuple[int, ...]] = {}
    for fused, fusion in fusion_plan(shapes).items():
        row = 0
        for expert in fusion.parts:
            for name in expert:
                places[name].append(Place(fused, row))
                row += needs[name].shape[0]
        first = fusion.parts[0][0]
        columns = needs[first].shape[1:] if len(shapes[first]) > 1 else ()
        experts = len(fusion.parts)
        fused_shapes[fused] = (experts, row // experts, *columns) if fusion.is_stacked else (row, *columns)
    return ShardLayout(needs, {name: tuple(each) for name, each in places.items()}, fused_shapes)


def _need(name: str, shape: tuple[int, ...], num_kv_heads: int, part: int, parts: int) -> Box:
    whole = whole_box(shape)
    rows, columns = whole.shape
    if name in _VOCABULARY:
        each = -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // parts
        return Box(min(rows, part * each), min(rows, (part + 1) * each), 0, columns)
    if name.endswith(_ROWS):
        return Box(*_share(name, rows, part, parts), 0, columns)
    if name.endswith(_KV_ROWS):
        kept = min(parts, num_kv_heads)  # each head is held by parts / kept shards
        return Box(*_share(name, rows, part * kept // parts, kept), 0, columns)
    if name.endswith(_COLUMNS):
        return Box(0, rows, *_share(name, columns, part, parts))
    return whole


def _share(name: str, size: int, part: int, parts: int) -> tuple[int, int]:
    if size % parts:
        raise ValueError(f"engine shards: {name} has {size} to cut, which {parts} shards do not divide")
    each = size // parts
    return part * each, (part + 1) * each
