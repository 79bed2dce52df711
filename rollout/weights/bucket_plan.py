"""Which rank sends which part of which tensor to which engine shard, in what order: a pure function of who holds what.

    holders: of each trainer rank {HF name: the box of that tensor that it holds}      needs: the same of each engine shard
    plan_pieces -> every number of every need once, each from a rank that has it       (replicas share the work)
    plan_buckets -> what travels at once, no bucket larger than asked, in one order that all sides follow

Rounds: in round r shard t is served by rank (t + r) mod ranks, so that ranks and shards are busy side by side. Everyone
works through the buckets that concern him in the one order, one at a time; whoever has the first unfinished bucket of
all can go on, so nobody waits in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
