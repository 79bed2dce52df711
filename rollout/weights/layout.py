"""The sharding of a model's tensors over an engine, and the plan of a transfer. Imports no torch.

Engines fuse the Hugging Face tensors:

    ...self_attn.{q,k,v}_proj.*         -> ...self_attn.qkv_proj.*        rows of q, k, v one below the other
    ...mlp.{gate,up}_proj.weight        -> ...mlp.gate_up_proj.weight     rows of gate, then up
    ...mlp.experts.E.{gate,up}_proj     -> ...mlp.experts.w13_weight      [experts, 2 width, hidden]
    ...mlp.experts.E.down_proj          -> ...mlp.experts.w2_weight       [experts, hidden, width]
    model.embed_tokens.weight           -> also lm_head.weight, where the checkpoint ties them

Everything else keeps its name. An engine over several GPUs shards first; a *shard* (EngineShard) has, as in vLLM:

    q, gate, up (of every expert)        a share of the rows
    k, v                                 a share of the rows, whole heads; replicated if there are fewer heads than shards
    o_proj, down_proj                    a share of the columns
    embed_tokens, lm_head                a share of the rows, the vocabulary rounded up to a multiple of 64
    norms, router                        all of it
    spread experts                       all of some experts, numbered from 0

Our local engine and a vLLM engine on one GPU are the single shard of a whole model. `shard_layout` computes this for given
shapes; used by the trainer for the tensors it sends and by the engine for those it received and computes with.

A transfer without files (direct.py) sends every shard what it needs, by a plan that is a pure function of the ranks' boxes:

    plan_pieces  -> covers every need exactly once, from ranks that have it          (replicas share the work)
    plan_buckets -> groups pieces into buckets of limited size, in one order that all sides follow

In round r shard t is served by rank (t + r) mod ranks, so that ranks and shards are busy concurrently. Everyone works
through its own buckets in this order, one at a time; whoever has the first unfinished bucket of all can
proceed, so there is no deadlock.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64  # vLLM's padding of the vocabulary
FP8_BLOCK = 128  # rows and columns with a scale of their own (fp8.py)
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PART = re.compile(r"^(.*)\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_PARTS_OF = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "w13": ("gate", "up"), "w2": ("down",), "": ("",)}
_STACKED = ("w13_weight", "w2_weight")  # one matrix per expert
_ROWS = tuple(f".{part}_proj.{suffix}" for part in ("q", "gate", "up") for suffix in ("weight", "bias"))
_KV_ROWS = (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")
_COLUMNS = (".o_proj.weight", ".down_proj.weight")
_ROWS_TOGETHER = 8  # pieces are cut at multiples of so many rows where possible, to keep 8-byte words whole


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Rows [row, row_end) and columns [col, col_end) of a tensor seen as a matrix; a vector is one column."""

    row: int
    row_end: int
    col: int
    col_end: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.row_end - self.row, self.col_end - self.col

    @property
    def num_elements(self) -> int:
        return max(0, self.row_end - self.row) * max(0, self.col_end - self.col)

    def overlap(self, other: Box) -> Box:
        """The intersection; num_elements is 0 if it is empty."""
        return Box(
            max(self.row, other.row), min(self.row_end, other.row_end),
            max(self.col, other.col), min(self.col_end, other.col_end),
        )  # fmt: skip

    def of(self, tensor: Tensor) -> Tensor:
        """This box of a tensor, [rows, columns]. A view."""
        return as_matrix(tensor)[self.row : self.row_end, self.col : self.col_end]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor of one or two dimensions."""
    return Box(0, shape[0], 0, shape[1] if len(shape) > 1 else 1)


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor as rows of its last dimension; a vector as one column. A view."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.view(-1, 1)


@dataclass(frozen=True, slots=True)
class EngineShard:
    """Part `part` of `parts` of a model, held by one worker of an engine; by default all of it.

    kv_parts: number of shards of the key and value heads: fewer than parts if several parts hold the same head.
    spreads_experts: each expert is whole in one part, instead of sharded over all.
    """

    part: int = 0
    parts: int = 1
    kv_parts: int = 1
    spreads_experts: bool = False

    @classmethod
    def of(cls, part: int, parts: int, num_kv_heads: int, *, spreads_experts: bool = False) -> EngineShard:
        """The shard as in vLLM for a model with so many key and value heads."""
        return cls(part, parts, min(parts, num_kv_heads), spreads_experts)

    def experts(self, num_experts: int) -> range:
        """Experts of which it holds a part. If whole ones do not divide evenly, the first parts have one more."""
        if not self.spreads_experts:
            return range(num_experts)
        each, more = divmod(num_experts, self.parts)
        first = self.part * each + min(self.part, more)
        return range(first, first + each + (self.part < more))


@dataclass(frozen=True, slots=True)
class Place:
    """Position of an HF tensor's box in a shard: from `row` on in `fused`, viewed as a matrix [.., last dimension]."""

    fused: str
    row: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The tensors of a shard.

    shapes: of its fused tensors. parts: HF tensors of each, concatenated along rows.
    needs: its box of each HF tensor. places: positions of that box; a tied embedding has two.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[str, ...]]
    needs: Mapping[str, Box]
    places: Mapping[str, tuple[Place, ...]]

    def placed(self, name: str, box: Box) -> tuple[int, tuple[Place, ...]]:
        """(first column, places with the first row) of a part of its box of an HF tensor."""
        need = self.needs[name]
        places = tuple(Place(place.fused, place.row + box.row - need.row) for place in self.places[name])
        return box.col - need.col, places


def shard_layout(shapes: Mapping[str, tuple[int, ...]], shard: EngineShard = EngineShard()) -> ShardLayout:
    """The layout of a shard of a model, or of a part of one, with HF tensors of these shapes.

    Raises:
        ValueError: a part of a fused tensor is missing (q without k) or has another shape than the others, experts are not
            numbered 0..n-1, or a dimension cannot be split into so many parts.
    """
    num_experts = 1 + max((int(found[2]) for name in shapes if (found := _EXPERT.match(name))), default=-1)
    experts = shard.experts(num_experts)
    parts = _fused_parts(shapes, experts)
    needs: dict[str, Box] = {}
    places: dict[str, list[Place]] = defaultdict(list)
    fused_shapes: dict[str, tuple[int, ...]] = {}
    for fused, names in parts.items():
        row = 0
        for name in names:
            needs[name] = _need(name, shapes[name], shard)
            places[name].append(Place(fused, row))
            row += needs[name].shape[0]
        columns = needs[names[0]].shape[1:] if len(shapes[names[0]]) > 1 else ()
        is_stacked = fused.endswith(_STACKED)
        fused_shapes[fused] = (len(experts), row // len(experts), *columns) if is_stacked else (row, *columns)
        each = len(names) // (len(experts) if is_stacked else 1)
        for number, name in enumerate(names):
            expected = [shapes[names[number % each]][0], *shapes[names[0]][1:]]
            if list(shapes[name]) != expected:
                has = list(shapes[name])
                raise ValueError(f"weights: {name} has shape {has}, expected {expected} as a part of {fused}")
    return ShardLayout(fused_shapes, parts, needs, {name: tuple(each) for name, each in places.items()})


def _fused_parts(names: Iterable[str], experts: range) -> dict[str, tuple[str, ...]]:
    """{fused tensor: its HF tensors, in order of rows}, in order of first appearance."""
    groups: dict[tuple[str, str], dict[tuple[int, str], str]] = defaultdict(dict)
    for name in names:
        if found := _EXPERT.match(name):
            base, number, part = found[1], int(found[2]), found[3]
            kind = "w2" if part == "down" else "w13"
            if number in experts:
                groups[f"{base}.{kind}_weight", kind][number, part] = name
        elif found := _PART.match(name):
            base, part, suffix = found.groups()
            kind = "qkv" if part in "qkv" else "gate_up"
            groups[f"{base}.{kind}_proj.{suffix}", kind][0, part] = name
        else:
            groups[name, ""][0, ""] = name
    plan = {}
    for (fused, kind), members in groups.items():
        is_stacked = fused.endswith(_STACKED)
        wanted = list(itertools.product(experts if is_stacked else (0,), _PARTS_OF[kind]))
        if missing := [each for each in wanted if each not in members]:
            of_expert = f" of expert {missing[0][0]}" if is_stacked else ""
            raise ValueError(
                f"weights: {fused} is fused from {', '.join(f'{part}_proj' for part in _PARTS_OF[kind])}, but {len(missing)} of "
                f"{len(wanted)} tensors are missing, first {missing[0][1]}_proj{of_expert}; found {sorted(members.values())[:4]}"
            )
        plan[fused] = tuple(members[each] for each in wanted)
    if EMBEDDING in plan:
        plan.setdefault(HEAD, plan[EMBEDDING])  # a model without its own head uses its embedding there
    return plan


def fuse(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    shard: EngineShard = EngineShard(),
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, fused tensor) of a shard, cast to dtype: only one fused tensor is in memory at a time.

    device: of the fused tensors, in their own memory; None: that of the parts, and a tensor fused from
    a single part may be the part itself. Each value is copied at most once.

    Raises:
        ValueError: see shard_layout.
    """
    layout = shard_layout({name: tuple(tensors[name].shape) for name in tensors}, shard)
    for fused, names in layout.parts.items():
        shape, first = layout.shapes[fused], tensors[names[0]]
        where, kind = device or first.device, dtype or first.dtype
        if len(names) == 1 and len(shape) < 3:
            yield fused, layout.needs[names[0]].of(first).view(shape).to(where, kind, copy=device is not None)
            continue
        out = first.new_empty(shape, dtype=kind, device=where)
        row = 0
        for name in names:
            values = layout.needs[name].of(tensors[name])
            as_matrix(out)[row : row + len(values)].copy_(values)
            row += len(values)
        yield fused, out


def _need(name: str, shape: tuple[int, ...], shard: EngineShard) -> Box:
    whole = whole_box(shape)
    rows, columns = whole.shape
    part, parts = shard.part, shard.parts
    if shard.spreads_experts and _EXPERT.match(name):
        return whole
    if name in (EMBEDDING, HEAD):
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


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an HF tensor that rank `source` sends to engine shard `target`."""

    name: str
    box: Box
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Pieces sent at once, concatenated in this order, each row by row."""

    source: int
    target: int
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.box.num_elements for piece in self.pieces)


def plan_pieces(holders: Sequence[Mapping[str, Box]], needs: Sequence[Mapping[str, Box]]) -> list[Piece]:
    """Cover every need once. If several ranks hold the same box, the one with the least to send takes it.

    Args:
        holders: of each trainer rank {HF name: its box of that tensor}. needs: the same of each engine shard.

    Raises:
        ValueError: a part of a need is held by no rank, or the boxes of two ranks overlap without being equal.
    """
    ranks_of: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, boxes in enumerate(holders):
        for name, box in boxes.items():
            ranks_of[name][box].append(rank)
    boxes_of = {name: sorted(ranks.items()) for name, ranks in ranks_of.items()}
    load = [0] * len(holders)
    pieces = []
    for target, need in enumerate(needs):
        for name, wanted in need.items():
            found = 0
            for box, ranks in boxes_of.get(name, ()):
                part = wanted.overlap(box)
                if part.num_elements == 0:
                    continue
                source = min(ranks, key=lambda rank: (load[rank], (rank - target) % len(holders)))
                load[source] += part.num_elements
                found += part.num_elements
                pieces.append(Piece(name, part, source, target))
            if found != wanted.num_elements:
                raise ValueError(
                    f"weight transfers: engine shard {target} needs {wanted.num_elements} numbers of {name} ({wanted}), and "
                    f"the trainer's ranks hold {found} of them: {boxes_of.get(name, [])}"
                )
    return pieces


def plan_buckets(pieces: Sequence[Piece], num_ranks: int, max_elements: int) -> list[WeightBucket]:
    """The pieces in buckets of at most max_elements values, in the order that all sides follow.

    Raises:
        ValueError: a bucket has no room for one row of a piece.
    """
    by_pair: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_pair[piece.source, piece.target].append(piece)
    buckets = []
    for source, target in sorted(by_pair, key=lambda pair: ((pair[0] - pair[1]) % num_ranks, pair[1])):
        waiting: list[Piece] = []
        room = max_elements
        for piece in by_pair[source, target]:
            for part in _cut(piece, max_elements):
                if part.box.num_elements > room:
                    buckets.append(WeightBucket(source, target, tuple(waiting)))
                    waiting, room = [], max_elements
                waiting.append(part)
                room -= part.box.num_elements
        buckets.append(WeightBucket(source, target, tuple(waiting)))
    return buckets


def _cut(piece: Piece, max_elements: int) -> list[Piece]:
    """Split the piece into ranges of rows that fit into a bucket."""
    box = piece.box
    num_rows, num_cols = box.shape
    rows = max_elements // num_cols
    if rows < 1:
        raise ValueError(
            f"weight transfers: a bucket of {max_elements} numbers has no room for a row of {piece.name} ({num_cols}); raise "
            "sync.bucket_mib"
        )
    if rows >= num_rows:
        return [piece]
    rows = rows // _ROWS_TOGETHER * _ROWS_TOGETHER or rows
    starts = range(box.row, box.row_end, rows)
    return [replace(piece, box=replace(box, row=at, row_end=min(at + rows, box.row_end))) for at in starts]
