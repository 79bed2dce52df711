"""Rows on their way through the stages, and the lines in which a stage keeps them.

{"row": 17, "id": "raw.jsonl:18", "keys": ["question", "answer"], "kind": "near duplicate", "detail": "similarity 0.93 to
raw.jsonl:3", "fields": {...the row as it was read...}}
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marsrl.rollout.jsonl import BadLine
from marsrl.rollout.tasks.data import problem_of, read_problem_rows
from marsrl.rollout.types import Problem

DEEPEST = 200  # of nested lists and objects in a row; Python's own bound is near 1000


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the inputs.

    number: its place among all of them, from 0. fields: as it was read. keys: of its question and its answer.
    fault: why it is no problem (its question is empty then); "" behind the first stage.
    """

    number: int
    problem: Problem
    fields: Mapping[str, object]
    keys: tuple[str, str]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A stage's word on a row.

    kind: why, in a few words that many rows share, by which they are counted; detail: what is the row's own.
    """

    is_kept: bool
    kind: str
    detail: str = ""


Decisions = Generator[tuple[Row, Decision], None, None]


@dataclass(frozen=True, slots=True)
class Stage:
    """A reason to keep rows or drop them.

    settings: everything that its decisions depend on beside the rows, as JSON. decide: gives each row with what is decided about
    it, in their order; it may read as many rows ahead as it likes, and gives back what it holds when it is closed.
    """

    name: str
    settings: Mapping[str, Any]
    decide: Callable[[Iterator[Row]], Decisions]


def read_inputs(paths: Sequence[Path], task: str, question_key: str | None, answer_key: str | None) -> Iterator[Row]:
    """Every row of the inputs, those that hold no problem too; ids of several begin with their place, as data.train's do."""
    number = 0
    for place, path in enumerate(paths):
        for found in read_problem_rows(path, task, question_key, answer_key):
            uid = f"{place}/" * (len(paths) > 1) + f"{found.file.name}:{found.line}"
            problem, fault = found.problem, ""
            if isinstance(problem, BadLine):
                problem, fault = Problem(uid, "", None, task), str(problem)
            problem = replace(problem, id=uid)
            yield Row(number, problem, found.fields, found.keys, fault)
            number += 1


def to_line(row: Row, decision: Decision) -> bytes:
    """A line of a stage's file; BadLine where the row has no JSON."""
    head = {"row": row.number, "id": row.problem.id, "keys": row.keys, "kind": decision.kind, "detail": decision.detail}
    return encoded({**head, "fields": row.fields})


def from_line(line: bytes, task: str) -> Row:
    """The row that to_line wrote, where it was kept."""
    held = json.loads(line)
    keys = (held["keys"][0], held["keys"][1])
    return Row(held["row"], problem_of(held["id"], held["fields"], task, keys), held["fields"], keys)


def encoded(value: Mapping[str, Any]) -> bytes:
    """JSON in a line. What only tables hold has the nearest form: dates ISO 8601, numbers that are none null.

    Raises:
        BadLine: there is none (bytes, or deeper than DEEPEST).
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        text = json.dumps(_plain(value, DEEPEST), ensure_ascii=False, allow_nan=False)
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair, in a field that nobody asked for
        return json.dumps(json.loads(text)).encode("ascii") + b"\n"


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise BadLine(f"lists and objects of the row are nested more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(below, depth - 1) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below, depth - 1) for below in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise BadLine(f"a field of the row is {type(value).__name__}, which JSON does not have")
