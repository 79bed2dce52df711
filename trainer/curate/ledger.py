"""What a stage has decided, on disk: kept.jsonl and dropped.jsonl, a line a row, only ever appended to.

A stage that was killed goes on behind the rows that stand in either file without a gap. What is behind them, a torn last
line or lines of one file whose neighbours of the other are lost, is cut off and decided again.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pydantic import Field

from marsrl.rollout.config import Settings
from marsrl.rollout.jsonl import BadLine
from marsrl.trainer.curate.rows import Decision, Row, to_line
from marsrl.trainer.runs.directory import names_file

FLUSH_S, SYNC_S = 1.0, 10.0  # between handing lines to the system, and to the disk
NUM_EXAMPLES = 6  # of each kind
MAX_EXAMPLE_CHARS = 1500


class Example(Settings):
    """A row of the report. order: examples are those of the lowest, a hash of the row's number."""

    id: str
    question: str
    detail: str
    order: int


class Tally(Settings):
    """How many rows a stage kept and dropped for what, and some of them."""

    kept: dict[str, int] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)
    kept_examples: dict[str, list[Example]] = Field(default_factory=dict)
    dropped_examples: dict[str, list[Example]] = Field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        return sum(self.kept.values())

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())


class _File:
    """One of the two: read as far as it is good, then written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self._file: BinaryIO = open(path, "r+b")  # noqa: SIM115 - the ledger closes it
        self._end = 0
        self._next: tuple[int, Decision, int] | None = None
        self.counts: Counter[str] = Counter()
        self._examples: dict[str, list[tuple[int, int, Example]]] = {}  # heaps by kind: the highest order first

    def peek(self, number: int, is_kept: bool) -> Decision | None:
        """The decision of the next line, if it is of this row."""
        if self._next is None:
            line = self._file.readline()
            self._next = _decided(line, is_kept) if line.endswith(b"\n") else None
        return self._next[1] if self._next is not None and self._next[0] == number else None

    def take(self, row: Row) -> None:
        """The line that was peeked at stays."""
        assert self._next is not None and self._next[0] == row.number, (self._next, row.number)
        (_, decision, size), self._next = self._next, None
        self._end += size
        self.note(row, decision)

    def cut(self) -> None:
        """Nothing is behind what was taken."""
        with names_file(self._path):
            self._file.truncate(self._end)
            self._file.seek(self._end)

    def write(self, line: bytes) -> None:
        with names_file(self._path):
            self._file.write(line)

    def note(self, row: Row, decision: Decision) -> None:
        self.counts[decision.kind] += 1
        order = zlib.crc32(str(row.number).encode())
        best = self._examples.setdefault(decision.kind, [])
        if len(best) == NUM_EXAMPLES and -order <= best[0][0]:
            return
        question = row.problem.question[:MAX_EXAMPLE_CHARS]
        example = Example(id=row.problem.id, question=question, detail=decision.detail[:MAX_EXAMPLE_CHARS], order=order)
        change = heapq.heappushpop if len(best) == NUM_EXAMPLES else heapq.heappush
        change(best, (-order, row.number, example))

    def examples(self) -> dict[str, list[Example]]:
        return {
            kind: [example for *_, example in sorted(best, key=lambda each: each[2].order)]
            for kind, best in self._examples.items()
        }

    def flush(self, to_disk: bool) -> None:
        with names_file(self._path):
            self._file.flush()
            if to_disk:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Ledger:
    """The decisions of one stage.

    with Ledger(folder) as ledger:
        for row, decision in stage.decisions(ledger.undecided(rows, stage.recall)):
            ledger.add(row, decision)
        tally = ledger.finish()
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._kept, self._dropped = _File(folder / "kept.jsonl"), _File(folder / "dropped.jsonl")
        self._clock = clock
        self._flushed = self._synced = clock()
        self.num_found = 0  # rows that were decided before

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kept.close()
        self._dropped.close()

    def undecided(self, rows: Iterator[Row], recall: Callable[[Row, Decision], None]) -> Iterator[Row]:
        """The rows behind those that are decided; recall is told of those."""
        for row in rows:
            decision = self._kept.peek(row.number, True) or self._dropped.peek(row.number, False)
            if decision is None or not decision.is_final:
                rows = itertools.chain([row], rows)
                break
            self.num_found += 1
            (self._kept if decision.is_kept else self._dropped).take(row)
            recall(row, decision)
        self._kept.cut()
        self._dropped.cut()
        return rows

    def add(self, row: Row, decision: Decision) -> None:
        """A row that has no JSON is dropped, whatever the decision."""
        try:
            line = to_line(row, decision)
        except BadLine as reason:
            row, decision = Row(row.number, row.problem, {}, row.keys), Decision(False, "unreadable row", str(reason))
            line = to_line(row, decision)
        file = self._kept if decision.is_kept else self._dropped
        file.write(line)
        file.note(row, decision)
        now = self._clock()
        if now - self._flushed >= FLUSH_S:
            self.flush(to_disk=now - self._synced >= SYNC_S)

    def finish(self) -> Tally:
        """All of it is on disk."""
        self.flush()
        return Tally(
            kept=dict(self._kept.counts),
            dropped=dict(self._dropped.counts),
            kept_examples=self._kept.examples(),
            dropped_examples=self._dropped.examples(),
        )

    def flush(self, to_disk: bool = True) -> None:
        for file in (self._kept, self._dropped):
            file.flush(to_disk)
        self._flushed = self._clock()
        self._synced = self._flushed if to_disk else self._synced


def _decided(line: bytes, is_kept: bool) -> tuple[int, Decision, int] | None:
    try:
        held = json.loads(line)
        decision = Decision(is_kept, str(held["kind"]), str(held["detail"]), bool(held["is_final"]))
        return int(held["row"]), decision, len(line)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
