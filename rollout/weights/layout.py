"""Sharding of a model's tensors over an engine, and the plan of a transfer. Imports no torch.

Engines fuse the Hugging Face tensors:

    ...self_attn.{q,k,v}_proj.*         -> ...self_attn.qkv_proj.*        rows of q, k, v one below the other
    ...mlp.{gate,up}_proj.weight        -> ...mlp.gate_up_proj.weight     rows of gate, then up
    ...mlp.experts.E.{gate,up}_proj     -> ...mlp.experts.w13_weight      [experts, 2 width, hidden]
    ...mlp.experts.E.down_proj          -> ...mlp.experts.w2_weight       [experts, hidden, width]
    model.embed_tokens.weight           -> also lm_head.weight, where the checkpoint ties them

All other tensors keep their names. For a transfer, the experts' tensors of a layer form one *stack* per projection, [experts,
rows, columns], called ...mlp.experts.{gate,up,down}_proj.weight, so that a transfer has one piece instead of hundreds.

An engine over several GPUs splits the tensors into shards. A *shard* (EngineShard) has, as in vLLM:

    q, gate, up (of every expert)        a share of the rows
    k, v                                 a share of the rows, whole heads; replicated if there are fewer heads than shards
    o_proj, down_proj                    a share of the columns
    embed_tokens, lm_head                a share of the rows, the vocabulary rounded up to a multiple of 64
    norms, router                        everything
    spread experts                       some whole experts, renumbered from 0

The local engine and a vLLM engine on one GPU are the single shard of a whole model. `shard_layout` computes this from
shapes; the trainer uses it for the tensors it sends, and the engine for those it receives and computes with.

A transfer without files (direct.py) sends every shard what it needs. Its plan is a pure function of the boxes (Box) that the
ranks hold:

    plan_pieces  -> covers every need exactly once, from ranks that hold it          (replicas share the work)
    plan_buckets -> groups pieces into buckets of limited size, in one order that all sides follow

A *portion* is a matrix of a fused tensor, or as many of its experts as fit into a bucket. A shard receives portion after
portion, so that it can collect one in a bucket's memory and convert it (FP8). Shard t begins with the portions of rank (t mod
number of ranks), so that all ranks send at the same time. Every side works through its own buckets in this order, one at a time.
The side with the first unfinished bucket of all can always proceed, so there is no deadlock.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod
from operator import sub
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
VOCAB_MULTIPLE = 64  # vLLM's padding of the vocabulary
FP8_BLOCK = 128  # rows and columns of a block with one scale (engines/vllm/worker_fp8.py)
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)(\.(?:gate|up|down)_proj(?:\.lora_[AB])?\.weight)$")
_STACK = re.compile(r"^(.*\.mlp\.experts)\.(gate|up|down)_proj\.weight$")
_PART = re.compile(r"^(.*)\.(q|k|v|gate|up)_proj\.(weight|bias)$")
_PARTS_OF = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "w13": ("gate", "up"), "w2": ("down",), "": ("",)}
_ROWS = tuple(f".{part}_proj.{suffix}" for part in ("q", "gate", "up") for suffix in ("weight", "bias"))
_KV_ROWS = (".k_proj.weight", ".k_proj.bias", ".v_proj.weight", ".v_proj.bias")
_COLUMNS = (".o_proj.weight", ".down_proj.weight")


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The matrices, rows and columns from `start` to `end` of a stack. A matrix is a stack of one; a vector has one column."""

    start: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.end, self.start))

    @property
    def num_elements(self) -> int:
        return prod(max(0, size) for size in self.shape)

    def overlap(self, other: Box) -> Box:
        """Return the intersection; num_elements is 0 if it is empty."""
        return Box(tuple(map(max, self.start, other.start)), tuple(map(min, self.end, other.end)))

    def cut(self, axis: int, start: int, end: int) -> Box:
        """Return the box with another range of matrices (axis 0), rows (1) or columns (2)."""
        after = axis + 1
        return Box((*self.start[:axis], start, *self.start[after:]), (*self.end[:axis], end, *self.end[after:]))

    def within(self, other: Box, row: int = 0) -> Box:
        """Return the box's position in a tensor that holds the box `other` from row `row` on."""
        origin = (other.start[0], other.start[1] - row, other.start[2])
        return Box(tuple(map(sub, self.start, origin)), tuple(map(sub, self.end, origin)))

    def of(self, tensor: Tensor) -> Tensor:
        """Return this box of a tensor, [matrices, rows, columns]. A view."""
        stack = tensor[None, :, None] if tensor.dim() == 1 else tensor[None] if tensor.dim() == 2 else tensor
        return stack[tuple(map(slice, self.start, self.end))]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of one to three dimensions."""
    return Box((0, 0, 0), (1, *shape, 1) if len(shape) == 1 else (1, *shape)[-3:])


def stack_of(name: str) -> tuple[str, int]:
    """Return (name of its stack, number of the expert) for an expert's HF tensor, and (name, 0) for other tensors."""
    found = _EXPERT.match(name)
    return (found[1] + found[3], int(found[2])) if found else (name, 0)


def box_of(name: str, shape: Sequence[int]) -> tuple[str, Box]:
    """Return the name of an HF tensor's stack, and the tensor's box in the stack."""
    stack, expert = stack_of(name)
    return stack, whole_box(shape).cut(0, expert, expert + 1)


def stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Replace experts' tensors in the shapes by stacks; ValueError if experts are not 0..n-1 or differ in shape."""
    sizes: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in shapes.items():
        stack, expert = stack_of(name)
        sizes[stack][expert] = shape
    for stack, each in sizes.items():
        if set(each) != set(range(len(each))) or len(set(each.values())) > 1:
            found = sorted(each.items())
            raise ValueError(
                f"weights: {stack}: found experts {found[:4]}; expected experts 0 to {len(each) - 1} of one shape"
            )
    return {stack: each[0] if stack in shapes else (len(each), *each[0]) for stack, each in sizes.items()}


@dataclass(frozen=True, slots=True)
class EngineShard:
    """Part `part` of a model that is split into `parts` parts; a worker of an engine holds it. Default: the whole model.

    kv_parts: number of parts of the key and value heads; it is less than `parts` if several parts hold the same head.
    spreads_experts: True if each expert is whole in one part, instead of split over all parts.
    """

    part: int = 0
    parts: int = 1
    kv_parts: int = 1
    spreads_experts: bool = False

    @classmethod
    def of(cls, part: int, parts: int, num_kv_heads: int, *, spreads_experts: bool = False) -> EngineShard:
        """Build the shard as in vLLM for a model with this many key and value heads."""
        return cls(part, parts, min(parts, num_kv_heads), spreads_experts)

    def experts(self, num_experts: int) -> range:
        """Return the range of experts that the shard holds, wholly or in part.

        If spread experts do not divide evenly, the first shards have one more.
        """
        if not self.spreads_experts:
            return range(num_experts)
        each, more = divmod(num_experts, self.parts)
        first = self.part * each + min(self.part, more)
        return range(first, first + each + (self.part < more))


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Tensors of a shard.

    shapes: shapes of the shard's fused tensors. parts: the HF tensors or stacks that each fused tensor consists of, in row order.
    needs: the shard's box of each HF tensor or stack. places: (fused tensor, first row) of each box; a tied embedding has two.
    """

    shapes: Mapping[str, tuple[int, ...]]
    parts: Mapping[str, tuple[str, ...]]
    needs: Mapping[str, Box]
    places: Mapping[str, Sequence[tuple[str, int]]]

    def placed(self, name: str, box: Box) -> list[tuple[str, Box]]:
        """Return (fused tensor, box in it) for each place where the shard holds `box`, a part of its box of the tensor `name`."""
        return [(fused, box.within(self.needs[name], row)) for fused, row in self.places[name]]


def shard_layout(shapes: Mapping[str, tuple[int, ...]], shard: EngineShard = EngineShard()) -> ShardLayout:
    """Compute the layout of a shard of a model, or of a part of one, from the shapes of its HF tensors or stacks.

    Raises ValueError: a part of a fused tensor is missing (q without k) or has another shape than the others, experts are not
    numbered 0..n-1, or a dimension cannot be split into this many parts.
    """
    shapes = stacked(shapes)
    parts = _fused_parts(shapes)
    needs: dict[str, Box] = {}
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    fused_shapes: dict[str, tuple[int, ...]] = {}
    for fused, names in parts.items():
        row, first = 0, shapes[names[0]]
        for name in names:
            has = shapes[name]
            if whole_box(has).shape[::2] != whole_box(first).shape[::2]:  # compare matrices and columns, but not rows
                raise ValueError(
                    f"weights: {name} has shape {list(has)}, but another part of {fused} has {list(first)}; expected the same "
                    "columns"
                )
            needs[name] = _need(name, has, shard)
            places[name].append((fused, row))
            row += needs[name].shape[1]
        matrices, _, cols = needs[names[0]].shape
        fused_shapes[fused] = (row,) if len(first) == 1 else (matrices, row, cols)[-len(first) :]
    return ShardLayout(fused_shapes, parts, needs, places)


def _fused_parts(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return {fused tensor: its parts, in order of rows}, in order of first appearance."""
    groups: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for name in names:
        if match := _STACK.match(name):
            base, part = match.groups()
            kind = "w2" if part == "down" else "w13"
            groups[f"{base}.{kind}_weight", kind][part] = name
        elif match := _PART.match(name):
            base, part, suffix = match.groups()
            kind = "qkv" if part in "qkv" else "gate_up"
            groups[f"{base}.{kind}_proj.{suffix}", kind][part] = name
        else:
            groups[name, ""][""] = name
    plan = {}
    for (fused, kind), members in groups.items():
        wanted = _PARTS_OF[kind]
        if missing := [f"{part}_proj" for part in wanted if part not in members]:
            raise ValueError(f"weights: {fused} lacks {', '.join(missing)}; found only {sorted(members.values())}")
        plan[fused] = tuple(members[part] for part in wanted)
    if EMBEDDING in plan:
        plan.setdefault(HEAD, plan[EMBEDDING])  # a tied model uses its embedding as head
    return plan


def fuse(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    shard: EngineShard = EngineShard(),
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, fused tensor) of a shard, cast to dtype; only one fused tensor is in memory at a time.

    device: device of the fused tensors, which get new memory. None: the parts' device; a fused tensor with a single part may then
    share its memory. Each value is copied at most once.

    Raises ValueError: see shard_layout.
    """
    layout = shard_layout({name: tuple(tensors[name].shape) for name in tensors}, shard)
    names = {stack_of(name): name for name in tensors}
    for fused, parts in layout.parts.items():
        shape, need = layout.shapes[fused], layout.needs[parts[0]]
        first = tensors[names[parts[0], need.start[0]]]
        where, kind = device or first.device, dtype or first.dtype
        if len(parts) == 1 and len(shape) < 3:
            yield fused, need.of(first).view(shape).to(where, kind, copy=device is not None)
            continue
        out = first.new_empty(shape, dtype=kind, device=where)
        for part in parts:
            need = layout.needs[part]
            ((_, place),) = layout.placed(part, need)
            for expert, matrix in enumerate(place.of(out), need.start[0]):
                matrix.copy_(need.cut(0, 0, 1).of(tensors[names[part, expert]])[0])
        yield fused, out


def _need(name: str, shape: tuple[int, ...], shard: EngineShard) -> Box:
    whole = whole_box(shape)
    matrices, rows, columns = whole.shape
    part, parts = shard.part, shard.parts
    if shard.spreads_experts and _STACK.match(name):
        experts = shard.experts(matrices)
        return whole.cut(0, experts.start, experts.stop)
    if name in (EMBEDDING, HEAD):
        padded = -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return whole.cut(1, *(min(rows, row) for row in _share(name, padded, part, parts)))
    if name.endswith(_ROWS):
        return whole.cut(1, *_share(name, rows, part, parts))
    if name.endswith(_KV_ROWS):
        return whole.cut(1, *_share(name, rows, part * shard.kv_parts // parts, shard.kv_parts))
    if name.endswith(_COLUMNS):
        return whole.cut(2, *_share(name, columns, part, parts))
    return whole


def _share(name: str, size: int, part: int, parts: int) -> tuple[int, int]:
    if size % parts:
        raise ValueError(f"engine shards: {name} has size {size}, which is not divisible by {parts} shards")
    each = size // parts
    return part * each, (part + 1) * each


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of an HF tensor or of a stack, which rank `source` sends to engine shard `target`."""

    name: str
    box: Box
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Pieces sent at once, concatenated in this order, each matrix by matrix and row by row."""

    source: int
    target: int
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.box.num_elements for piece in self.pieces)


def plan_pieces(holders: Sequence[Mapping[str, Box]], needs: Sequence[Mapping[str, Box]]) -> list[Piece]:
    """Cover every need once. If several ranks hold the same box, the one with the least to send takes it.

    holders: {name: box of that tensor} held by each trainer rank. needs: {name: box of that tensor} needed by each engine shard.

    Raises ValueError: a part of a need is held by no rank, or the boxes of two ranks overlap without being equal.
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
            num_covered = 0
            for box, ranks in boxes_of.get(name, ()):
                part = wanted.overlap(box)
                if part.num_elements == 0:
                    continue
                source = min(ranks, key=lambda rank: (load[rank], (rank - target) % len(holders)))
                load[source] += part.num_elements
                num_covered += part.num_elements
                pieces.append(Piece(name, part, source, target))
            if num_covered != wanted.num_elements:
                raise ValueError(
                    f"weight transfers: engine shard {target} needs {wanted.num_elements} numbers of {name} ({wanted}), but "
                    f"the trainer's ranks hold {num_covered} of them: {boxes_of.get(name, [])}"
                )
    return pieces


def plan_buckets(
    pieces: Sequence[Piece], layouts: Sequence[ShardLayout], num_ranks: int, max_elements: int
) -> list[WeightBucket]:
    """Group the pieces into buckets of at most max_elements values, in the order that all sides follow.

    layouts: one per engine shard. A shard receives consecutive portions together if they have at most max_elements values in all,
    and a larger portion alone.

    Raises ValueError: a bucket has no room for one row of a piece.
    """
    portions: list[dict[tuple[str, int], list[Piece]]] = [defaultdict(list) for _ in layouts]
    for piece in pieces:
        layout = layouts[piece.target]
        fused, origin = layout.places[piece.name][0][0], layout.needs[piece.name].start[0]
        step = portion_size(layout.shapes[fused], max_elements)
        for number in range((piece.box.start[0] - origin) // step, -((origin - piece.box.end[0]) // step)):
            first = origin + number * step
            part = piece.box.cut(0, first, first + step).overlap(piece.box)
            portions[piece.target][fused, number].append(replace(piece, box=part))
    queues = [_queue(list(each.values()), target, num_ranks, max_elements) for target, each in enumerate(portions)]
    return [bucket for buckets in zip_longest(*queues) for bucket in buckets if bucket is not None]


def portion_size(shape: Sequence[int], max_elements: int) -> int:
    """Return the number of matrices in a portion, so that portions fit into a bucket, are few and have about the same size."""
    matrices, rows, cols = whole_box(shape).shape
    most = max(1, max_elements // (rows * cols))
    return -(-matrices // -(-matrices // most))


def _queue(portions: Sequence[list[Piece]], target: int, num_ranks: int, max_elements: int) -> list[WeightBucket]:
    """Return the buckets of one engine shard in order."""

    def turn(source: int) -> int:
        return (source - target) % num_ranks

    groups, room = list[list[Piece]](), 0
    for portion in sorted(portions, key=lambda portion: min(turn(piece.source) for piece in portion)):
        size = sum(piece.box.num_elements for piece in portion)
        if size > room:
            groups.append([])
            room = max_elements
        groups[-1].extend(portion)
        room -= size
    buckets = []
    for group in groups:
        for source in sorted({piece.source for piece in group}, key=turn):
            waiting, room = list[Piece](), max_elements
            for part in (part for piece in group if piece.source == source for part in _cut(piece, max_elements)):
                if part.box.num_elements > room:
                    buckets.append(WeightBucket(source, target, tuple(waiting)))
                    waiting, room = [], max_elements
                waiting.append(part)
                room -= part.box.num_elements
            buckets.append(WeightBucket(source, target, tuple(waiting)))
    return buckets


def _cut(piece: Piece, max_elements: int) -> list[Piece]:
    """Split the piece into whole matrices, or ranges of rows of one, that fit into a bucket."""
    box = piece.box
    _, num_rows, num_cols = box.shape
    rows = max_elements // num_cols
    if rows < 1:
        raise ValueError(
            f"weight transfers: a bucket of {max_elements} numbers has no room for a row of {piece.name} ({num_cols}); raise "
            "sync.bucket_mib"
        )
    matrices = max(1, rows // num_rows)
    return [
        replace(piece, box=box.cut(0, first, first + matrices).cut(1, row, row + rows).overlap(box))
        for first in range(box.start[0], box.end[0], matrices)
        for row in range(box.start[1], box.end[1], rows)
    ]
