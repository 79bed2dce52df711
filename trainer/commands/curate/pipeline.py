"""Runs the stages in order, each over the rows that the previous one kept.

OUT/stages/<name>/   kept.jsonl, dropped.jsonl   a line a row (rows.py)
                     answers.jsonl               of models, by request (runs/answers.py)
                     stage.json                  settings, counts and examples, once the stage has finished
OUT/curated.jsonl    the rows that the last stage kept, unchanged
OUT/report.html      OUT/lock

A stopped stage is repeated from its first row; saved answers of models are not requested again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import pydantic
from pydantic import Field

from marsrl.rollout.config import Settings
from marsrl.rollout.jsonl import BadLine
from marsrl.trainer.commands.curate.rows import Decision, Row, Stage, encoded, from_line, to_line
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.answers import key_of
from marsrl.trainer.runs.directory import names_file, opened_atomically, write_json
from marsrl.trainer.runs.existing_run import flat

NUM_EXAMPLES = 6  # of each kind
MAX_EXAMPLE_CHARS = 1500


class Example(Settings):
    """A row of the report."""

    id: str
    question: str
    detail: str


class Tally(Settings):
    """Counts of the rows that a stage kept and dropped, by kind, with examples."""

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


class StageRecord(Settings):
    """stage.json. key: of the settings of this stage and of all before it."""

    name: str
    settings: dict[str, Any]
    key: str
    tally: Tally


class _Decided:
    """The kept, or the dropped, rows of a stage: their file, counts by kind, and examples of each kind."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with names_file(path):
            self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 - close() does
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Example]] = {}  # the first of each kind

    def add(self, row: Row, decision: Decision, line: bytes) -> None:
        with names_file(self._path):
            self._file.write(line)
        self.counts[decision.kind] += 1
        own = self.examples.setdefault(decision.kind, [])
        if len(own) < NUM_EXAMPLES:
            question, detail = row.problem.question[:MAX_EXAMPLE_CHARS], decision.detail[:MAX_EXAMPLE_CHARS]
            own.append(Example(id=row.problem.id, question=question, detail=detail))

    def close(self) -> None:
        """Flush to disk and close."""
        with names_file(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())


@dataclass(frozen=True)
class Pipeline:
    """Runs the stages that are not on disk yet.

    open_rows: reads the inputs from the start. task: of the rows' problems.
    """

    out: Path
    stages: Sequence[Stage]
    open_rows: Callable[[], Iterator[Row]]
    task: str
    console: RunConsole

    def run(self) -> list[StageRecord]:
        """Finish every stage, write curated.jsonl, and return all records."""
        records: list[StageRecord] = []
        key, is_told = "", False
        for number, stage in enumerate(self.stages):
            key = key_of(before=key, name=stage.name, settings=stage.settings)
            found = self._record(stage.name)
            if found is not None and found.key == key:
                self.console.message(f"{stage.name}: done before, {_counts(found.tally)}")
                records.append(found)
                continue
            if not is_told:
                self._tell_what_is_redone(self.stages[number:], found)
                is_told = True
            self._file(stage.name, "stage.json").unlink(missing_ok=True)  # before the rows that it counts
            tally = self._run(stage, records[-1] if records else None)
            records.append(StageRecord(name=stage.name, settings=dict(stage.settings), key=key, tally=tally))
            write_json(self._file(stage.name, "stage.json"), records[-1].model_dump(mode="json"))
            self.console.message(f"{stage.name}: {_counts(tally)}")
        with opened_atomically(self.out / "curated.jsonl") as file:
            file.writelines(encoded(row.fields) for row in self._kept(records[-1].name))
        return records

    def _run(self, stage: Stage, before: StageRecord | None) -> Tally:
        self._file(stage.name, "").mkdir(parents=True, exist_ok=True)
        rows, total = (self.open_rows(), None) if before is None else (self._kept(before.name), before.tally.num_kept)
        with (
            closing(_Decided(self._file(stage.name, "kept.jsonl"))) as kept,
            closing(_Decided(self._file(stage.name, "dropped.jsonl"))) as dropped,
            closing(stage.decide(rows)) as decisions,
            self.console.progress(f"curate: {stage.name}", total, "rows") as bar,
        ):
            for row, decision in decisions:
                try:
                    line = to_line(row, decision)
                except BadLine as reason:  # not representable in JSON: dropped, whatever the decision
                    row, decision = replace(row, fields={}), Decision(False, "unreadable row", str(reason))
                    line = to_line(row, decision)
                (kept if decision.is_kept else dropped).add(row, decision, line)
                bar.advance()
        return Tally(
            kept=kept.counts, dropped=dropped.counts, kept_examples=kept.examples, dropped_examples=dropped.examples
        )

    def _kept(self, name: str) -> Iterator[Row]:
        with self._file(name, "kept.jsonl").open("rb") as lines:
            for line in lines:
                yield from_line(line, self.task)

    def _tell_what_is_redone(self, stages: Sequence[Stage], found: StageRecord | None) -> None:
        """Warn if decisions on disk are obsolete. found: of the first of these stages."""
        if any(self._file(stage.name, "stage.json").exists() for stage in stages):
            changed = ["it was not there"]
            if found is not None:
                old, new = flat(found.settings), flat(stages[0].settings)
                differ = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                changed = [f"{key} is {str(new.get(key))[:200]}, was {str(old.get(key))[:200]}" for key in differ]
            why = "; ".join(changed) or "the stages before it are others"
            names = ", ".join(stage.name for stage in stages)
            self.console.warning(f"curate.{stages[0].name}: {why}. Done again: {names}")

    def _record(self, name: str) -> StageRecord | None:
        """The record of a finished stage; None also for an invalid file, so that the stage runs again."""
        try:
            return StageRecord.model_validate_json(self._file(name, "stage.json").read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            return None

    def _file(self, stage: str, name: str) -> Path:
        return self.out / "stages" / stage / name


def _counts(tally: Tally) -> str:
    why = ", ".join(f"{count:,} {kind}" for kind, count in sorted(tally.dropped.items(), key=lambda e: -e[1]))
    return f"{tally.num_kept:,} kept, {tally.num_dropped:,} dropped{f' ({why})' if why else ''}"
