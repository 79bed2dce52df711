"""samples/step_N.parquet: every sample of a step, for people, the viewer and any reader of Parquet (DuckDB, pandas, Polars).

    duckdb -c "SELECT agent, avg(reward) FROM 'runs/a/samples/*.parquet' GROUP BY agent"
    python -c "import pandas; print(pandas.read_parquet('runs/a/samples/step_3.parquet'))"

A row for each sample: step, line (from 1) and the fields of SampleRecord. Models' texts are unchanged, except that lone
surrogates, which UTF-8 cannot encode, become "?".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from marsrl.rollout.types import Finish, Group, Sample, Segment
from marsrl.trainer.report.parquet import opened, schema_of, write_rows
from marsrl.trainer.runs.directory import RunDirectory, step_files

_ROW_GROUP_CHARS = 8 << 20  # characters of prompts and texts in a row group, the unit that is read to show one sample


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One sample as logged: texts and numbers, no token ids. None = missing, or not applicable to the role."""

    uid: str
    parent_uid: str | None
    group_id: str
    rollout_id: str
    problem_id: str
    agent: str
    prompt: str
    text: str
    answer: str | None
    verdict: bool | None
    reward: float | None
    correct: float | None
    parts: Mapping[str, float | None]
    note: str
    advantage: float | None
    num_prompt_tokens: int
    num_tokens: int
    finish: Finish
    segments: tuple[Segment, ...]


def record(sample: Sample, advantage: float | None) -> SampleRecord:
    """Logged row of a sample. A NaN (a missing reward) becomes None."""
    return SampleRecord(
        uid=sample.uid,
        parent_uid=sample.parent_uid,
        group_id=sample.group_id,
        rollout_id=sample.rollout_id,
        problem_id=sample.problem_id,
        agent=sample.agent,
        prompt=sample.prompt_text,
        text=sample.text,
        answer=sample.answer,
        verdict=sample.verdict,
        reward=_finite(sample.reward.value),
        correct=_finite(sample.reward.correct),
        parts={name: _finite(value) for name, value in sample.reward.parts.items()},
        note=sample.reward.note,
        advantage=None if advantage is None else _finite(advantage),
        num_prompt_tokens=len(sample.prompt_ids),
        num_tokens=len(sample.token_ids),
        finish=sample.finish,
        segments=sample.segments,
    )


def write_samples(
    run: RunDirectory, step: int, groups: Iterable[Group], advantages: Mapping[str, float] | None = None
) -> Path:
    """Write the samples of a step atomically and return the file. advantages: {sample uid: advantage}.

    A step that is repeated after a resume replaces its file.
    """
    samples = (sample for group in groups for sample in group.samples)
    return write_records(
        run, step, (record(each, advantages.get(each.uid) if advantages is not None else None) for each in samples)
    )


def write_records(run: RunDirectory, step: int, records: Iterable[SampleRecord]) -> Path:
    """As `write_samples`, from records."""
    schema = schema_of(SampleRecord, "step", "line")
    return write_rows(run.samples / f"step_{step}.parquet", schema, _row_groups(step, records))


def _row_groups(step: int, records: Iterable[SampleRecord]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    num_chars = 0
    for line, each in enumerate(records, start=1):
        rows.append({"step": step, "line": line, **_row(each)})
        num_chars += len(each.prompt) + len(each.text)
        if num_chars > _ROW_GROUP_CHARS:
            yield rows
            rows, num_chars = [], 0
    yield rows


def sample_files(run: RunDirectory) -> dict[int, Path]:
    """{step: file}, in order of steps."""
    return step_files(run.samples)


def read_samples(path: Path) -> Iterator[SampleRecord]:
    """The samples of a file, read by row groups, so that a step of long texts need not fit in memory.

    Raises ValueError: the file, which the message names, is missing or damaged.
    """
    with opened(path, "file of samples") as file:
        for batch in file.iter_batches(batch_size=256):
            yield from map(_from_row, batch.to_pylist())


def read_lines(path: Path, lines: Collection[int]) -> dict[int, SampleRecord]:
    """{line: sample} of some lines of a file, from 1; row groups without any of them are not read.

    Raises ValueError: the file is gone, damaged, or has no such line; says which.
    """
    found: dict[int, SampleRecord] = {}
    with opened(path, "file of samples") as file:
        end = 0
        for group in range(file.num_row_groups):
            begin, end = end, end + file.metadata.row_group(group).num_rows
            if own := sorted(line for line in lines if begin < line <= end):
                table = file.read_row_group(group).take([line - 1 - begin for line in own])
                found |= zip(own, map(_from_row, table.to_pylist()), strict=True)
    if missing := sorted(set(lines) - found.keys()):
        raise ValueError(f"{path} has no line {missing[0]} (any more: a step that is played again has a new file)")
    return found


_FIELDS = tuple(field.name for field in fields(SampleRecord))


def _row(sample: SampleRecord) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in _FIELDS}
    return {name: _utf8(value) if isinstance(value, str) else value for name, value in values.items()} | {
        "parts": [(_utf8(name), value) for name, value in sample.parts.items()],
        "finish": sample.finish.value,
        "segments": [{"start": each.start, "end": each.end, "version": each.version} for each in sample.segments],
    }


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _from_row(values: dict[str, Any]) -> SampleRecord:
    own = {name: value for name, value in values.items() if name not in ("step", "line")}
    own["parts"] = dict(values["parts"])
    own["segments"] = tuple(Segment(**each) for each in values["segments"])
    own["finish"] = Finish(values["finish"])
    return SampleRecord(**own)  # unknown or missing columns raise


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
