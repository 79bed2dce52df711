"""The parts of a Qwen2.5 / Qwen3 / Qwen3-MoE model's tensors: where an engine has them, and who sends which. Imports no torch.

Engines fuse the Hugging Face tensors:

    ...self_attn.{q,k,v}_proj.*         -> ...self_attn.qkv_proj.*        rows of q, k, v one below the other
    ...mlp.{gate,up}_proj.weight        -> ...mlp.gate_up_proj.weight     rows of gate, then up
    ...mlp.experts.E.{gate,up}_proj     -> ...mlp.experts.w13_weight      [experts, 2 width, hidden]
    ...mlp.experts.E.down_proj          -> ...mlp.experts.w2_weight       [experts, hidden, width]
    model.embed_tokens.weight           -> also lm_head.weight, where the checkpoint ties them

Everything else keeps its name. An engine over several GPUs cuts them first; a *shard* (EngineShard) has, as vLLM cuts:

    q, gate, up (of every expert)        a share of the rows
    k, v                                 a share of the rows, whole heads; with fewer heads than shards they are repeated
    o_proj, down_proj                    a share of the columns
    embed_tokens, lm_head                a share of the rows, the vocabulary rounded up to a multiple of 64
    norms, router                        all of it
    experts that are spread              all of some experts, numbered from 0

Our local engine and a vLLM engine on one GPU are the one shard of a whole model. The trainer uses this file on the tensors
that it sends, the engine on those that it received and those that it computes with.

A transfer without files (direct.py) sends every shard what it needs, by a plan that is a pure function of who holds what:

    plan_pieces  -> every number of every need once, each from a rank that has it   (replicas share the work)
    plan_buckets -> what travels at once, no bucket larger than asked, in one order that all sides follow

In round r shard t is served by rank (t + r) mod ranks, so that ranks and shards are busy side by side. Everyone works
through the buckets that concern him in the one order, one at a time; whoever has the first unfinished bucket of all can
go on, so nobody waits in a circle.
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
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_PART = re.compile(r"^(.*)\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_LAYER = re.compile(r"^model\.layers\.\d+\.")
_PARTS_OF = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "w13": ("gate", "up"), "w2": ("down",), "": ("",)}
_ROWS = (".q_proj.weight", ".q_proj.bias", ".gate_proj.weight", ".up_proj.weight")
_KV_ROWS = (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")
_COLUMNS = (".o_proj.weight", ".down_proj.weight")
_ROWS_TOGETHER = 8  # a piece is cut at multiples of so many rows, where it can be: words of 8 bytes stay whole


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
        """What both cover; num_elements is 0 where that is nothing."""
        return Box(
            max(self.row, other.row), min(self.row_end, other.row_end),
            max(self.col, other.col), min(self.col_end, other.col_end),
        )  # fmt: skip


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor of one or two dimensions."""
    return Box(0, shape[0], 0, shape[1] if len(shape) > 1 else 1)


@dataclass(frozen=True, slots=True)
class EngineShard:
    """Part `part` of `parts` of a model, which one worker of an engine holds; the default is all of it.

    kv_parts: into how many the key and value heads are cut: fewer than parts where several parts hold the same head.
    spreads_experts: each expert is whole in one part, instead of cut over all.
    """

    part: int = 0
    parts: int = 1
    kv_parts: int = 1
    spreads_experts: bool = False

    @classmethod
    def of(cls, part: int, parts: int, num_kv_heads: int, *, spreads_experts: bool = False) -> EngineShard:
        """As vLLM cuts a model with so many key and value heads."""
        return cls(part, parts, min(parts, num_kv_heads), spreads_experts)

    def experts(self, num_experts: int) -> range:
        """Experts of which it holds something. Where whole ones do not come out even, the first parts have one more."""
        if not self.spreads_experts:
            return range(num_experts)
        each, more = divmod(num_experts, self.parts)
        first = self.part * each + min(self.part, more)
        return range(first, first + each + (self.part < more))


@dataclass(frozen=True, slots=True)
class ExpertName:
    """The name of a tensor of one expert, in parts."""

    base: str
    number: int
    part: str

    def renamed(self, number: int) -> str:
        """The same tensor's name in another expert."""
        return f"{self.base}.{number}.{self.part}_proj.weight"


def expert_of(name: str) -> ExpertName | None:
    """None: the tensor is of no expert."""
    found = _EXPERT.match(name)
    return ExpertName(found[1], int(found[2]), found[3]) if found else None


@dataclass(frozen=True, slots=True)
class Fusion:
    """The tensors that make up a fused one. parts[e]: those whose rows follow each other; is_stacked: a matrix an expert."""

    parts: tuple[tuple[str, ...], ...]
    is_stacked: bool


def fusion_plan(names: Iterable[str], *, ties_head: bool = True) -> dict[str, Fusion]:
    """{name of the fused tensor: what it is made of}, in the order of first appearance.

    ties_head: a model without a head of its own has its embedding there.

    Raises:
        ValueError: a part is missing (q without k), or experts are not numbered 0..n-1.
    """
    groups: dict[tuple[str, str], dict[tuple[int, str], str]] = defaultdict(dict)
    for name in names:
        if expert := expert_of(name):
            kind = "w2" if expert.part == "down" else "w13"
            groups[f"{expert.base}.{kind}_weight", kind][expert.number, expert.part] = name
        elif part_of := _PART.match(name):
            base, part, suffix = part_of.groups()
            kind = "qkv" if part in "qkv" else "gate_up"
            groups[f"{base}.{kind}_proj.{suffix}", kind][0, part] = name
        else:
            groups[name, ""][0, ""] = name
    plan = {fused: _fusion(fused, kind, members) for (fused, kind), members in groups.items()}
    if ties_head and EMBEDDING in plan and HEAD not in plan:
        plan[HEAD] = plan[EMBEDDING]
    return plan


def _fusion(fused: str, kind: str, members: Mapping[tuple[int, str], str]) -> Fusion:
    parts = _PARTS_OF[kind]
    experts = max(index for index, _ in members) + 1
    missing = [(e, p) for e in range(experts) for p in parts if (e, p) not in members]
    if missing:
        raise ValueError(
            f"weights: {fused} is fused from {', '.join(f'{p}_proj' for p in parts)}"
            f"{f' of {experts} experts' if experts > 1 else ''}, but {len(missing)} of these tensors are missing, first "
            f"{missing[0][1]}_proj{f' of expert {missing[0][0]}' if experts > 1 else ''}; found {sorted(members.values())[:4]}"
        )
    return Fusion(tuple(tuple(members[e, p] for p in parts) for e in range(experts)), kind in ("w13", "w2"))


def fuse(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, fused tensor) one after the other, cast to dtype: only one fused tensor is held at a time.

    device: where they are made, in memory of their own; None: where the parts are, and a tensor that is fused from
    nothing may be the part itself. Each number is copied once at most.
    """
    for name, fusion in fusion_plan(tensors).items():
        first = tensors[fusion.parts[0][0]]
        if fusion.is_stacked or len(fusion.parts[0]) > 1:
            yield name, _stacked(name, fusion, tensors, dtype or first.dtype, device or first.device)
        else:
            yield name, first.to(device or first.device, dtype or first.dtype, copy=device is not None)


def _stacked(
    name: str, fusion: Fusion, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Tensor:
    first = tensors[fusion.parts[0][0]]
    shapes = [tensors[part].shape for part in fusion.parts[0]]
    rows = sum(shape[0] for shape in shapes)
    fused = first.new_empty((len(fusion.parts), rows, *shapes[0][1:]), dtype=dtype, device=device)
    for out, parts in zip(fused, fusion.parts, strict=True):
        at = 0
        for part, shape in zip(parts, shapes, strict=True):
            tensor = tensors[part]
            if tensor.shape != shape or shape[1:] != shapes[0][1:]:
                raise ValueError(
                    f"weights: {part} has shape {list(tensor.shape)}, expected {[shape[0], *shapes[0][1:]]} as a part of {name}"
                )
            out[at : at + shape[0]].copy_(tensor)
            at += shape[0]
    return fused if fusion.is_stacked else fused[0]


def by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """HF-named tensors a decoder layer at a time; what lies before, between and after layers comes as it is.

    Raises:
        ValueError: the tensors of a layer do not come one after the other.
    """
    seen: set[str] = set()
    for layer, members in itertools.groupby(
        tensors, lambda named: found[0] if (found := _LAYER.match(named[0])) else ""
    ):
        if layer in seen:
            raise ValueError(
                f"weights: tensors of {layer}* come in several places; expected one layer after the other, each whole"
            )
        seen |= {layer} if layer else set()
        yield dict(members)


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

    def placed(self, name: str, box: Box) -> tuple[int, tuple[Place, ...]]:
        """(first column, places with the first row) of a part of its box of an HF tensor."""
        need = self.needs[name]
        places = tuple(Place(place.fused, place.row + box.row - need.row) for place in self.places[name])
        return box.col - need.col, places


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
        for name in itertools.chain(*fusion.parts):
            places[hf_name[name]].append(Place(fused, row))
            row += needs[hf_name[name]].shape[0]
        first = hf_name[fusion.parts[0][0]]
        columns = needs[first].shape[1:] if len(shapes[first]) > 1 else ()
        experts = len(fusion.parts)
        fused_shapes[fused] = (experts, row // experts, *columns) if fusion.is_stacked else (row, *columns)
    return ShardLayout(needs, {name: tuple(each) for name, each in places.items()}, fused_shapes)


class ShardTensors(Mapping[str, "Tensor"]):
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
    """Pieces that travel at once, laid end to end in this order, each row by row."""

    source: int
    target: int
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.box.num_elements for piece in self.pieces)


def plan_pieces(holders: Sequence[Mapping[str, Box]], needs: Sequence[Mapping[str, Box]]) -> list[Piece]:
    """Every need covered once. Where several ranks hold the same box, the one that has the least to send takes it.

    Args:
        holders: of each trainer rank {HF name: the box of that tensor that it holds}. needs: the same of each engine shard.

    Raises:
        ValueError: a part of a need is held by nobody, or the boxes of two ranks overlap without being equal.
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
    """The pieces in buckets of at most max_elements numbers, in the order in which all sides work through them.

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
    """The piece in runs of rows that fit into a bucket."""
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
