"""Which part of every HF tensor an engine shard holds, and where in its fused tensors (fused_layout.py) it lies.

A tensor-parallel shard, as vLLM cuts a Qwen2.5 / Qwen3 / Qwen3-MoE model:

    q, gate, up (of every expert)        a share of the rows
    k, v                                 a share of the rows, whole heads; with fewer heads than shards they are repeated
    o_proj, down_proj                    a share of the columns
    embed_tokens, lm_head                a share of the rows, the vocabulary rounded up to a multiple of 64
    norms, router                        all of it
    experts that are spread              all of some experts, which it numbers from 0

Our local engine and a vLLM engine on one GPU are the one shard of a whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from marsrl.rollout.weights.bucket_plan import Box, whole_box
from marsrl.rollout.weights.engine_shard import VOCAB_MULTIPLE, EngineShard
from marsrl.rollout.weights.fused_layout import expert_of, fusion_plan

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
    """needs: its box of each HF tensor that it has a part of. places: where that box lies (a tied embedding lies in two
    fused tensors). shapes: of its fused tensors."""

    needs: Mapping[str, Box]
    places: Mapping[str, tuple[Place, ...]]
    shapes: Mapping[str, tuple[int, ...]]


def shard_layout(shapes: Mapping[str, tuple[int, ...]], shard: EngineShard) -> ShardLayout:
    """The layout of a shard of a model whose HF tensors have these shapes.

    Raises:
        ValueError: a dimension cannot be cut into so many parts.
    """
    hf_name = _names(shapes, shard)
    needs = {name: _need(name, shapes[name], shard) for name in hf_name.values()}
    places: dict[str, list[Place]] = defaultdict(list)
    fused_shapes: dict[str, tuple[int, ...]] = {}
    for fused, fusion in fusion_plan(hf_name).items():
        row = 0
        for expert in fusion.parts:
            for name in expert:
                places[hf_name[name]].append(Place(fused, row))
                row += needs[hf_name[name]].shape[0]
        first = hf_name[fusion.parts[0][0]]
        columns = needs[first].shape[1:] if len(shapes[first]) > 1 else ()
        experts = len(fusion.parts)
        fused_shapes[fused] = (experts, row // experts, *columns) if fusion.is_stacked else (row, *columns)
    return ShardLayout(needs, {name: tuple(each) for name, each in places.items()}, fused_shapes)


class ShardTensors(Mapping[str, Tensor]):
    """What a shard holds of HF-named tensors (a model's, or those of whole layers), each cut when it is asked for.

    Of experts that are spread it has its own, under the numbers that it gives them.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shard: EngineShard) -> None:
        self._tensors, self._shard = tensors, shard
        self._names = _names(tensors, shard)

    def __getitem__(self, name: str) -> Tensor:
        """A view.

        Raises:
            ValueError: it cannot be cut into so many parts.
        """
        name = self._names[name]
        tensor = self._tensors[name]
        need = _need(name, tuple(tensor.shape), self._shard)
        rows = tensor[need.row : need.row_end]
        return rows[:, need.col : need.col_end] if tensor.dim() > 1 else rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _names(names: Iterable[str], shard: EngineShard) -> dict[str, str]:
    """{name that the shard gives a tensor: its HF name} of those it has a part of."""
    if not shard.spreads_experts:
        return {name: name for name in names}
    experts = {name: expert_of(name) for name in names}
    num_experts = 1 + max((expert.number for expert in experts.values() if expert), default=-1)
    mine = shard.experts(num_experts)
    return {
        expert.renamed(expert.number - mine.start) if expert else name: name
        for name, expert in experts.items()
        if expert is None or expert.number in mine
    }


def _need(name: str, shape: tuple[int, ...], shard: EngineShard) -> Box:
    whole = whole_box(shape)
    rows, columns = whole.shape
    part, parts = shard.part, shard.parts
    if shard.spreads_experts and expert_of(name):
        return whole
    if name in _VOCABULARY:
        start, end = _share(name, -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, part, parts)
        return Box(min(rows, start), min(rows, end), 0, columns)
    if name.endswith(_ROWS):
        return Box(*_share(name, rows, part, parts), 0, columns)
    if name.endswith(_KV_ROWS):
        return Box(*_share(name, rows, part * shard.kv_parts // parts, shard.kv_parts), 0, columns)
    if name.endswith(_COLUMNS):
        return Box(0, rows, *_share(name, columns, part, parts))
    return whole


def _share(name: str, size: int, part: int, parts: int) -> tuple[int, int]:
    if size % parts:
        raise ValueError(f"engine shards: {name} has {size} to cut, which {parts} shards do not divide")
    each = size // parts
    return part * each, (part + 1) * each
