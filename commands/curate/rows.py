"""Rows, their JSON lines in a stage's files, and the stages that need no model.

{"row": 17, "id": "raw.jsonl:18", "keys": ["question", "answer"], "kind": "near duplicate", "detail": "similarity 0.93 to
raw.jsonl:3", "fields": {...the row as it was read...}}
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marsrl.rollout.jsonl import BadLine
from marsrl.rollout.tasks.data import has_placeholder, lookup, problem_of, read_problem_rows
from marsrl.rollout.types import Problem
from marsrl.trainer.config.curate import LevelConfig

_ENOUGH = 50  # minimum number of rows for a meaningful share


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the inputs.

    number: index among all rows, from 0. fields: the row as read. keys: names of the question's and answer's fields.
    fault: why the row is not a valid problem; "" if it is valid. The question of an invalid row is empty. The first stage drops
        invalid rows.
    """

    number: int
    problem: Problem
    fields: Mapping[str, object]
    keys: tuple[str, str]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A stage's decision on a row.

    kind: short reason, by which rows are counted. detail: details about this row.
    """

    is_kept: bool
    kind: str
    detail: str = ""


Decisions = Generator[tuple[Row, Decision], None, None]


@dataclass(frozen=True, slots=True)
class Stage:
    """A rule that keeps or drops rows.

    settings: everything that the decisions depend on besides the rows, as JSON.
    decide: yields each row with its decision, in order. It may read any number of rows ahead, and releases its resources when
        closed.
    """

    name: str
    settings: Mapping[str, Any]
    decide: Callable[[Iterator[Row]], Decisions]


def read_inputs(paths: Sequence[Path], task: str, question_key: str | None, answer_key: str | None) -> Iterator[Row]:
    """Yield every row of the inputs, including invalid ones. With several inputs, ids begin with the input's index."""
    number = 0
    for index, path in enumerate(paths):
        for source_row in read_problem_rows(path, task, question_key, answer_key):
            uid = f"{index}/" * (len(paths) > 1) + f"{source_row.file.name}:{source_row.line}"
            problem, fault = source_row.problem, ""
            if isinstance(problem, BadLine):
                problem, fault = Problem(uid, "", None, task), str(problem)
            problem = replace(problem, id=uid)
            yield Row(number, problem, source_row.fields, source_row.keys, fault)
            number += 1


def to_line(row: Row, decision: Decision) -> bytes:
    """Encode a row and its decision as a line of a stage's file. Raises BadLine if JSON cannot represent the row."""
    head = {"row": row.number, "id": row.problem.id, "keys": row.keys, "kind": decision.kind, "detail": decision.detail}
    return encoded({**head, "fields": row.fields})


def from_line(line: bytes, task: str) -> Row:
    """Decode a kept row from a line that to_line wrote."""
    record = json.loads(line)
    keys = (record["keys"][0], record["keys"][1])
    return Row(record["row"], problem_of(record["id"], record["fields"], task, keys), record["fields"], keys)


def encoded(value: Mapping[str, Any]) -> bytes:
    """Encode as one line of JSON. Dates become ISO 8601 text; NaN and infinity become null.

    Raises BadLine: JSON cannot represent the value (bytes, or too many levels).
    """
    try:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_nearest)
        except ValueError:
            finite = json.loads(json.dumps(value, default=_nearest), parse_constant=lambda name: None)
            text = json.dumps(finite, ensure_ascii=False)
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate in an unused field
        return json.dumps(json.loads(text)).encode("ascii") + b"\n"
    except (TypeError, RecursionError) as error:
        raise BadLine(f"a field of the row cannot be written as JSON: {error}") from error


def _nearest(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    raise TypeError(f"it is {type(value).__name__}")


def readable(max_question_chars: int, origin: Mapping[str, Any], on_placeholder: str = "skip") -> Stage:
    """Return the stage that keeps valid rows whose question is not too long.

    origin: JSON that describes the inputs and how they are read. on_placeholder: whether to keep or skip rows with a placeholder
        as the answer.
    """

    def decide(row: Row) -> Decision:
        num_chars = len(row.problem.question)
        if row.fault:
            return Decision(False, "unreadable row", row.fault)
        if num_chars > max_question_chars:
            return Decision(
                False, "long question", f"{num_chars:,} characters, but at most {max_question_chars:,} allowed"
            )
        if on_placeholder == "skip" and has_placeholder(row.problem):
            return Decision(False, "placeholder", f"the answer is {row.problem.answer!r} (data.on_placeholder)")
        return Decision(True, "read")

    settings = {"max_question_chars": max_question_chars, "on_placeholder": on_placeholder, **origin}
    return Stage("read", settings, lambda rows: ((row, decide(row)) for row in rows))


def level(config: LevelConfig) -> Stage:
    """Return the stage that keeps rows whose field has one of the wanted values."""
    wanted = {_comparable(value) for value in config.keep}

    def decide(row: Row) -> Decision:
        field = lookup(row.fields, config.field)
        values = field if isinstance(field, Sequence) and not isinstance(field, str) else [field]
        if field is None or field != field or not values:  # NaN is not equal to itself
            return Decision(config.missing == "keep", "no level", f"{config.field} is missing")
        listed = ", ".join(str(value)[:80] for value in values[:5])
        is_kept = any(_comparable(value) in wanted for value in values)
        return Decision(is_kept, "wanted level" if is_kept else "other level", f"{config.field}: {listed}")

    return Stage("level", config.model_dump(mode="json"), lambda rows: ((row, decide(row)) for row in rows))


def _comparable(value: object) -> str:
    """Return the value as lower-case text for comparison: 3, 3.0 (a column of integers with gaps) and "3" are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().casefold()


class CurationStopped(RuntimeError):
    """Raised when a stage cannot continue. Its decisions stay on disk."""


class MissingShare:
    """Counter of rows without a verdict. most: largest allowed share of such rows; key: name of its setting, for messages."""

    def __init__(self, key: str, most: float) -> None:
        self._key, self._most = key, most
        self._num_missing = self._num_rows = 0

    def count(self, missing: str | None) -> None:
        """Count a row, and check the share once there are enough rows. missing: the row's id and why it has no verdict."""
        self._num_rows += 1
        if missing is not None:
            self._num_missing += 1
            if self._num_rows >= _ENOUGH:
                self.check(missing)

    def check(self, last: str = "the stage has ended") -> None:
        """Raise CurationStopped if too large a share of the rows so far has no verdict.

        last: the last of these rows and why it has none, for the error message.
        """
        if self._num_missing > self._most * self._num_rows:
            raise CurationStopped(
                f"{self._num_missing} of {self._num_rows} questions could not be judged, a share above "
                f"{self._key} = {self._most:g}; last: {last}. Fix the model or its prompt, or raise the share, and run the "
                "command again: judged answers are saved"
            )
