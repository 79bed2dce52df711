"""The stages one after the other, each over the rows that the one before it kept, and what of it is on disk.

OUT/stages/<name>/   kept.jsonl, dropped.jsonl   a line a row (rows.py), while the stage runs and after it
                     answers.jsonl               of models, by what was asked (answers.py)
                     stage.json                  settings and, when it has finished, counts and examples
OUT/curated.jsonl    what the last stage kept: the rows as they were read
OUT/report.html      OUT/lock
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from marsrl.rollout.config import Settings
from marsrl.trainer.curate.ledger import Ledger, Tally
from marsrl.trainer.curate.rows import Row, Stage, encoded, from_line
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.answers import key_of
from marsrl.trainer.runs.directory import names_file, write_json

_VERDICT_FILES = (
    "stage.json",
    "kept.jsonl",
    "dropped.jsonl",
)  # removed in this order: rows without a record count for nothing


class StageRecord(Settings):
    """stage.json. key: of the settings of this stage and of all before it. tally: None as long as it has not finished."""

    name: str
    settings: dict[str, Any]
    key: str
    tally: Tally | None = None


class Pipeline:
    """Runs the stages that are not on disk yet.

    open_rows: a fresh reading of the inputs. task: of the problems that rows hold.
    """

    def __init__(
        self,
        out: Path,
        stages: Sequence[Stage],
        open_rows: Callable[[], Iterator[Row]],
        task: str,
        console: RunConsole,
    ) -> None:
        self._folder, self._out = out / "stages", out
        self._stages, self._open_rows, self._task, self._console = stages, open_rows, task, console

    def run(self) -> list[StageRecord]:
        """Every stage to its end, and curated.jsonl; the records of all."""
        records: list[StageRecord] = []
        key, is_valid = "", True
        for stage in self._stages:
            settings = dict(stage.settings())
            key = key_of(before=key, name=stage.name, settings=settings)
            found = self._record(stage.name)
            if is_valid and (found is None or found.key != key):
                self._forget_from(len(records), found, settings)
                is_valid = False
            if found is not None and found.key == key and found.tally is not None:
                self._console.message(f"{stage.name}: done before, {self._counts(found.tally)}")
                records.append(found)
                continue
            begun = StageRecord(name=stage.name, settings=settings, key=key)
            write_json(self._file(stage.name, "stage.json"), begun.model_dump(mode="json"))
            rows = self._kept(records[-1].name) if records else self._open_rows()
            total = records[-1].tally.num_kept if records and records[-1].tally else None
            tally = self._run(stage, rows, total)
            records.append(begun.model_copy(update={"tally": tally}))
            write_json(self._file(stage.name, "stage.json"), records[-1].model_dump(mode="json"))
            self._console.message(f"{stage.name}: {self._counts(tally)}")
        self._write_result(records[-1].name)
        return records

    def _run(self, stage: Stage, rows: Iterator[Row], total: int | None) -> Tally:
        with (
            Ledger(self._folder / stage.name) as ledger,
            self._console.progress(f"curate: {stage.name}", total, "rows") as bar,
        ):
            try:
                left = ledger.undecided(rows, stage.recall)
                if ledger.num_found:
                    self._console.message(f"{stage.name}: goes on behind {ledger.num_found:,} rows")
                    bar.advance(ledger.num_found)
                for row, decision in stage.decisions(left):
                    ledger.add(row, decision)
                    bar.advance()
            finally:
                ledger.flush()
                stage.close()
            return ledger.finish()

    def _kept(self, name: str) -> Iterator[Row]:
        path = self._file(name, "kept.jsonl")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row, _ = from_line(line, self._task)
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise ValueError(
                        f"{path}:{number} is no line that marsrl curate wrote ({error}); remove {path.parent}"
                    ) from error
                yield row

    def _write_result(self, last: str) -> None:
        """curated.jsonl, whole or not at all."""
        path = self._out / "curated.jsonl"
        temporary = self._out / f".curated.{os.getpid()}.tmp"
        try:
            with names_file(path), temporary.open("wb") as file:
                for row in self._kept(last):
                    file.write(encoded(row.fields))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _forget_from(self, num_kept: int, found: StageRecord | None, settings: Mapping[str, Any]) -> None:
        """Decisions of all stages but the first ones, also of stages that are left out now. Answers of models stay."""
        first, valid = self._stages[num_kept].name, {stage.name for stage in self._stages[:num_kept]}
        old = [folder for folder in sorted(self._folder.glob("*")) if folder.name not in valid]
        files = [folder / name for name in _VERDICT_FILES for folder in old if (folder / name).exists()]
        if not files:
            return
        changed = ["it was not there"] if found is None else _changed(found.settings, settings)
        why = "; ".join(changed) or "the stages before it are others"
        names = ", ".join(stage.name for stage in self._stages[num_kept:])
        self._console.warning(f"curate.{first}: {why}. Done again: {names}")
        for file in files:
            file.unlink()

    def _record(self, name: str) -> StageRecord | None:
        path = self._file(name, "stage.json")
        if not path.exists():
            return None
        try:
            return StageRecord.model_validate_json(path.read_bytes())
        except pydantic.ValidationError as error:
            raise ValueError(f"{path} is no record of a stage: {error}; remove {path.parent}") from error

    def _file(self, stage: str, name: str) -> Path:
        return self._folder / stage / name

    @staticmethod
    def _counts(tally: Tally) -> str:
        why = ", ".join(f"{count:,} {kind}" for kind, count in sorted(tally.dropped.items(), key=lambda e: -e[1]))
        return f"{tally.num_kept:,} kept, {tally.num_dropped:,} dropped{f' ({why})' if why else ''}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """ "threshold is 0.9, was 0.8", key by key."""
    said = []
    for key in {**old, **new}:
        before, now = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            said += _changed(before, now, f"{prefix}{key}.")
        elif before != now:
            said.append(f"{prefix}{key} is {str(now)[:200]}, was {str(before)[:200]}")
    return said
