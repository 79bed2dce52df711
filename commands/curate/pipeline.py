"""Pipeline of stages, each of which reads the rows that the previous one kept.

OUT/stages/<name>/   kept.jsonl, dropped.jsonl   one line per row (rows.py)
                     answers.jsonl               models' answers, by request (runs/answers.py)
                     stage.json                  settings, counts and examples, once the stage has finished
OUT/curated.jsonl    the rows that the last stage kept, unchanged
OUT/report.html      OUT/lock

A stopped stage is repeated from its first row; saved answers of models are not requested again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pydantic

from marsrl.commands.curate.rows import Decision, Row, Stage, encoded, from_line, to_line
from marsrl.rollout.config import Settings
from marsrl.rollout.jsonl import BadLine
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.answers import key_of
from marsrl.trainer.runs.directory import opened_atomically, write_json
from marsrl.trainer.runs.existing_run import flat

NUM_EXAMPLES = 6  # examples per kind
MAX_EXAMPLE_CHARS = 1500


@dataclass
class Example:
    """A row that the report shows as an example."""

    id: str
    question: str
    detail: str


@dataclass
class Kind:
    """Rows that a stage kept or dropped for one reason. examples: the first of these rows."""

    is_kept: bool
    count: int = 0
    examples: list[Example] = field(default_factory=list)


class StageRecord(Settings):
    """Contents of stage.json. key: digest of the settings of this and all earlier stages. kinds: row counts by decision."""

    name: str
    settings: dict[str, Any]
    key: str
    kinds: dict[str, Kind]

    @property
    def kept(self) -> dict[str, int]:
        """Number of kept rows by kind."""
        return {name: kind.count for name, kind in self.kinds.items() if kind.is_kept}

    @property
    def dropped(self) -> dict[str, int]:
        return {name: kind.count for name, kind in self.kinds.items() if not kind.is_kept}

    @property
    def num_kept(self) -> int:
        return sum(self.kept.values())

    @property
    def num_rows(self) -> int:
        return sum(kind.count for kind in self.kinds.values())

    def __str__(self) -> str:
        why = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.dropped.items(), key=lambda e: -e[1]))
        return f"{self.num_kept:,} kept, {self.num_rows - self.num_kept:,} dropped{f' ({why})' if why else ''}"


@dataclass(frozen=True)
class Pipeline:
    """Pipeline that runs the stages that are not on disk yet.

    open_rows: called to read the inputs from the start. task: task of the rows' problems.
    """

    out: Path
    stages: Sequence[Stage]
    open_rows: Callable[[], Iterator[Row]]
    task: str
    console: RunConsole

    def run(self) -> list[StageRecord]:
        """Finish every stage, write curated.jsonl, and return all records."""
        records: list[StageRecord] = []
        key, is_warned = "", False
        for number, stage in enumerate(self.stages):
            key = key_of(before=key, name=stage.name, settings=stage.settings)
            record = self._record(stage.name)
            if record is not None and record.key == key:
                self.console.message(f"{stage.name}: already done, {record}")
                records.append(record)
                continue
            if not is_warned:
                self._warn_of_repeated_stages(self.stages[number:], record)
                is_warned = True
            self._file(stage.name, "stage.json").unlink(missing_ok=True)  # removed before the rows that it describes
            kinds = self._run(stage, records[-1] if records else None)
            records.append(StageRecord(name=stage.name, settings=dict(stage.settings), key=key, kinds=kinds))
            write_json(self._file(stage.name, "stage.json"), records[-1].model_dump(mode="json"))
            self.console.message(f"{stage.name}: {records[-1]}")
        with opened_atomically(self.out / "curated.jsonl") as file:
            file.writelines(encoded(row.fields) for row in self.kept(records[-1].name))
        return records

    def _run(self, stage: Stage, before: StageRecord | None) -> dict[str, Kind]:
        rows, total = (self.open_rows(), None) if before is None else (self.kept(before.name), before.num_kept)
        kinds: dict[str, Kind] = {}
        with (
            opened_atomically(self._file(stage.name, "kept.jsonl")) as kept_file,
            opened_atomically(self._file(stage.name, "dropped.jsonl")) as dropped_file,
            closing(stage.decide(rows)) as decisions,
            self.console.progress(f"curate: {stage.name}", total, "rows") as bar,
        ):
            for row, decision in decisions:
                try:
                    line = to_line(row, decision)
                except BadLine as reason:  # JSON cannot represent the row: it is dropped, whatever the decision
                    row, decision = replace(row, fields={}), Decision(False, "unreadable row", str(reason))
                    line = to_line(row, decision)
                (kept_file if decision.is_kept else dropped_file).write(line)
                kind = kinds.setdefault(decision.kind, Kind(decision.is_kept))
                kind.count += 1
                if len(kind.examples) < NUM_EXAMPLES:
                    texts = (text[:MAX_EXAMPLE_CHARS] for text in (row.problem.question, decision.detail))
                    kind.examples.append(Example(row.problem.id, *texts))
                bar.advance()
        return kinds

    def kept(self, name: str) -> Iterator[Row]:
        """Yield the rows that a finished stage kept."""
        with self._file(name, "kept.jsonl").open("rb") as lines:
            for line in lines:
                yield from_line(line, self.task)

    def _warn_of_repeated_stages(self, stages: Sequence[Stage], record: StageRecord | None) -> None:
        """Warn if these stages have decisions on disk, which are obsolete. record: the first stage's record on disk."""
        if any(self._file(stage.name, "stage.json").exists() for stage in stages):
            changed = ["the stage was not finished"]
            if record is not None:
                old, new = flat(record.settings), flat(stages[0].settings)
                differ = [key for key in {**old, **new} if old.get(key) != new.get(key)]
                changed = [f"{key} is {str(new.get(key))[:200]}, was {str(old.get(key))[:200]}" for key in differ]
            reason = "; ".join(changed) or "earlier stages have changed"
            names = ", ".join(stage.name for stage in stages)
            self.console.warning(f"curate.{stages[0].name}: {reason}; these stages run again: {names}")

    def _record(self, name: str) -> StageRecord | None:
        """Return the record of a finished stage; None if its file is missing or invalid, so that the stage runs again."""
        try:
            return StageRecord.model_validate_json(self._file(name, "stage.json").read_bytes())
        except (FileNotFoundError, pydantic.ValidationError):
            return None

    def _file(self, stage: str, name: str) -> Path:
        return self.out / "stages" / stage / name
