"""What the pages ask of an index: samples that pass a filter, the tree of a rollout, curves, spans.

A filter looks at the zones first (a few hundred thousand rows for ten million samples): they say how many samples pass and in
which steps they are, and only those are looked at, newest first, until a page is full or the time is over. A page says
where the next one begins, so a filter that hardly anything passes answers in time too, with less on the page.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from marsrl.trainer.view.index_file import FLAGS, first_id, loaded, place_of, stored

PAGE = 50
_BUDGET_S = 0.15  # after which a page is answered with what was found
_MOST_SPANS = 3000  # a browser draws so many rectangles at once
_WORD = re.compile(r"[^\W_]+")  # as FTS5's unicode61 cuts, near enough
_COLUMNS = (
    "id, agent, problem, rollout, flags, reward, correct, advantage, verdict, num_tokens, age, uid, parent, answer"
)


@dataclass(frozen=True, slots=True)
class Filter:
    """What samples are looked for by; None, "" and () do not restrict. low, high: of the reward; words: all of them occur."""

    agent: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    low: float | None = None
    high: float | None = None
    flags: tuple[str, ...] = ()
    problem: str | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A sample as a list shows it; what it wrote is in its samples file, at `line` of `step`."""

    step: int
    line: int
    agent: str
    problem: str
    rollout: str
    flags: tuple[str, ...]
    reward: float | None
    correct: float | None
    advantage: float | None
    verdict: bool | None
    num_tokens: int
    age: int | None
    uid: str
    parent: str | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class Page:
    """num: samples that pass, of which at most PAGE are here; None: not counted. next_id: of the page behind; None: the last."""

    rows: tuple[Row, ...]
    num: int | None
    next_id: int | None


def find(
    index: sqlite3.Connection, wanted: Filter, before: int | None = None, through: tuple[int, int] | None = None
) -> Page:
    """The newest samples that pass.

    Args:
        before: the `next_id` of the page before.
        through: (step, line) of a sample that the first page begins with, in place of the newest.

    Raises:
        ValueError: a flag or an agent that there is not, or words without a letter or digit.
    """
    began = time.monotonic()
    if unknown := set(wanted.flags) - FLAGS.keys():
        raise ValueError(f"{sorted(unknown)} is nothing to filter by; expected some of {', '.join(FLAGS)}")
    words = _WORD.findall(wanted.words)
    if wanted.words and not words:
        raise ValueError(f"{wanted.words[:40]!r} has no letter or digit: only words can be searched")
    conditions, values = _conditions(index, wanted)
    zones = _zones(index, wanted)
    num = None if words or wanted.problem is not None or None in [z[2] for z in zones] else sum(z[1] for z in zones)
    top = first_id(zones[0][0] + 1) if zones else 0
    if before is not None:
        top = before
    elif through is not None and (linked := _id_at(index, *through)) is not None:
        top = linked + 1
    rows: list[tuple[object, ...]] = []
    for low, high in _stretches(zones, top, at_once=wanted.problem is not None):
        if time.monotonic() - began > _BUDGET_S:
            return Page(_rows(index, rows), num, high)
        rows += _between(index, low, high, conditions, values, words, PAGE + 1 - len(rows))
        if len(rows) > PAGE:
            return Page(_rows(index, rows[:PAGE]), num, int(str(rows[PAGE - 1][0])))
    return Page(_rows(index, rows), num, None)


def _conditions(index: sqlite3.Connection, wanted: Filter) -> tuple[list[str], list[object]]:
    conditions: list[str] = []
    values: list[object] = []
    for column, name in (("agent", wanted.agent), ("problem", wanted.problem)):
        if name is not None:
            conditions.append(f"{column} = ?")
            values.append(_number(index, name))
    if wanted.flags:
        bits = sum(FLAGS[name] for name in wanted.flags)
        conditions.append("flags & ? = ?")
        values += [bits, bits]
    for sign, bound in ((">=", wanted.low), ("<=", wanted.high)):
        if bound is not None:
            conditions.append(f"reward {sign} ?")
            values.append(bound)
    return conditions, values


def _number(index: sqlite3.Connection, name: str) -> int:
    found = index.execute("SELECT id FROM names WHERE name = ?", (stored(name),)).fetchone()
    return found[0] if found else -1  # of nobody


def _zones(index: sqlite3.Connection, wanted: Filter) -> list[tuple[int, int, int | None]]:
    """(step, samples that may pass, 1 where all of them do, else None), newest first."""
    bits = sum(FLAGS[name] for name in wanted.flags)
    conditions, values = ["flags & ? = ?"], [bits, bits]
    if wanted.agent is not None:
        conditions.append("agent = ?")
        values.append(_number(index, wanted.agent))
    for sign, step in ((">=", wanted.first_step), ("<=", wanted.last_step)):
        if step is not None:
            conditions.append(f"step {sign} ?")
            values.append(step)
    inside = "1"
    bounds: list[object] = []
    if wanted.low is not None or wanted.high is not None:
        low = wanted.low if wanted.low is not None else float("-inf")
        high = wanted.high if wanted.high is not None else float("inf")
        conditions.append("high >= ? AND low <= ?")
        inside = "min(low >= ? AND high <= ?)"
        bounds = [low, high]
    sql = (
        f"SELECT step, sum(num), {inside} FROM zones WHERE {' AND '.join(conditions)} GROUP BY step ORDER BY step DESC"
    )
    found = index.execute(sql, [*bounds, *values, *bounds])
    return [(step, num, 1 if is_inside else None) for step, num, is_inside in found]


def _stretches(zones: Sequence[tuple[int, int, int | None]], top: int, *, at_once: bool) -> Iterator[tuple[int, int]]:
    """Ranges of ids [low, high) in which samples may be, newest first: neighbouring steps together, ever more of them.

    at_once: all in one, where an index of its own finds them.
    """
    steps = [step for step, _, _ in zones if first_id(step) < top]
    if at_once:
        if steps:
            yield first_id(steps[-1]), min(top, first_id(steps[0] + 1))
        return
    size, begin = 1, 0
    while begin < len(steps):
        end = begin + 1
        while end < len(steps) and end - begin < size and steps[end] == steps[end - 1] - 1:
            end += 1
        yield first_id(steps[end - 1]), min(top, first_id(steps[begin] + 1))
        begin, size = end, min(256, 2 * size)


def _between(
    index: sqlite3.Connection,
    low: int,
    high: int,
    conditions: Sequence[str],
    values: Sequence[object],
    words: Sequence[str],
    limit: int,
) -> list[tuple[object, ...]]:
    where = " AND ".join(["id >= ?", "id < ?", *conditions])
    if not words:
        sql = f"SELECT {_COLUMNS} FROM samples WHERE {where} ORDER BY id DESC LIMIT ?"
        return index.execute(sql, [low, high, *values, limit]).fetchall()
    sql = (
        f"SELECT {_COLUMNS} FROM words CROSS JOIN samples ON samples.id = words.rowid "
        f"WHERE words MATCH ? AND words.rowid >= ? AND words.rowid < ? AND {where} ORDER BY words.rowid DESC LIMIT ?"
    )
    match = " ".join(f'"{word}"' for word in words)
    return index.execute(sql, [match, low, high, low, high, *values, limit]).fetchall()


def tree(index: sqlite3.Connection, rollout: str) -> list[Row]:
    """Every sample of a rollout instance, oldest first; who stands below whom, their uids and parents say."""
    sql = f"SELECT {_COLUMNS} FROM samples WHERE rollout = ? ORDER BY id LIMIT 5000"
    return list(_rows(index, index.execute(sql, (_number(index, rollout),)).fetchall()))


def at(index: sqlite3.Connection, step: int, line: int) -> Row | None:
    """The sample at a line of a step's file."""
    found = index.execute(f"SELECT {_COLUMNS} FROM samples WHERE id = ?", (_id_at(index, step, line),)).fetchone()
    return _rows(index, [found])[0] if found else None


def _id_at(index: sqlite3.Connection, step: int, line: int) -> int | None:
    sql = "SELECT id FROM samples WHERE id >= ? AND id < ? AND id & 16777215 = ?"
    found = index.execute(sql, (first_id(step), first_id(step + 1), line)).fetchone()
    return found[0] if found else None


def _rows(index: sqlite3.Connection, found: Sequence[tuple]) -> tuple[Row, ...]:
    numbers = sorted({number for row in found for number in row[1:4]})
    names: dict[int, str] = {}
    for begin in range(0, len(numbers), 500):
        some = numbers[begin : begin + 500]
        sql = f"SELECT id, name FROM names WHERE id IN ({','.join('?' * len(some))})"
        names |= {number: name.decode("utf-8", "surrogatepass") for number, name in index.execute(sql, some)}
    rows = []
    for identity, agent, problem, rollout, flags, reward, correct, advantage, verdict, *rest in found:
        step, line = place_of(identity)
        num_tokens, age, uid, parent, answer = rest
        rows.append(
            Row(
                step,
                line,
                names[agent],
                names[problem],
                names[rollout],
                tuple(name for name, bit in FLAGS.items() if flags & bit),
                reward,
                correct,
                advantage,
                None if verdict is None else bool(verdict),
                num_tokens,
                age,
                loaded(uid) or "",
                loaded(parent),
                loaded(answer),
            )
        )
    return tuple(rows)


def judges(index: sqlite3.Connection) -> set[str]:
    """The agents that have given a verdict that could be read."""
    found = index.execute("SELECT DISTINCT agent FROM zones WHERE flags & ?", (FLAGS["verdict"],)).fetchall()
    return {_name(index, number) for (number,) in found}


def _name(index: sqlite3.Connection, number: int) -> str:
    return loaded(index.execute("SELECT name FROM names WHERE id = ?", (number,)).fetchone()[0]) or ""


def agents(index: sqlite3.Connection) -> list[str]:
    """Every agent, in order of its first step."""
    found = index.execute(  # from one agent to the next: SQLite would look at the zones of every step
        "WITH RECURSIVE each(agent) AS (SELECT min(agent) FROM zones UNION ALL "
        "SELECT (SELECT min(agent) FROM zones WHERE agent > each.agent) FROM each WHERE each.agent IS NOT NULL) "
        "SELECT agent, (SELECT min(step) FROM zones WHERE zones.agent = each.agent) FROM each WHERE agent IS NOT NULL "
        "ORDER BY 2, 1"
    )
    return [_name(index, number) for number, _ in found]


def counts(index: sqlite3.Connection) -> dict[str, int | None]:
    """How much there is: samples, steps that are indexed, the first and last of them."""
    num, files, first, last = index.execute(
        "SELECT sum(num), count(*), min(step), max(step) FROM files WHERE size >= 0"  # that are not gone
    ).fetchone()
    last_metrics = max(
        index.execute("SELECT max(step) FROM metrics WHERE name = ?", (number,)).fetchone()[0]
        for number in [*_metric_numbers(index)] or [-1]
    )
    return {"samples": num or 0, "files": files, "first_step": first, "last_step": last, "last_metrics": last_metrics}


def metric_names(index: sqlite3.Connection) -> list[str]:
    return [_name(index, number) for number in _metric_numbers(index)]


def _metric_numbers(index: sqlite3.Connection) -> list[int]:
    """Jumps from one to the next in the metrics' key: there are as many rows as steps times names."""
    sql = (
        "WITH RECURSIVE each(number) AS (SELECT min(name) FROM metrics UNION ALL "
        "SELECT (SELECT min(name) FROM metrics WHERE name > number) FROM each WHERE number IS NOT NULL) "
        "SELECT number FROM each WHERE number IS NOT NULL"
    )
    return [number for (number,) in index.execute(sql)]


def curve(index: sqlite3.Connection, name: str) -> list[tuple[int, float | None]]:
    """(step, value) of a metric; None: it was not finite."""
    sql = "SELECT step, value FROM metrics WHERE name = ? ORDER BY step"
    return index.execute(sql, (_number(index, name),)).fetchall()


def is_zero(index: sqlite3.Connection, name: str) -> bool:
    """Is a metric 0 in every step?"""
    sql = "SELECT 1 FROM metrics WHERE name = ? AND (value IS NULL OR value != 0) LIMIT 1"
    return index.execute(sql, (_number(index, name),)).fetchone() is None


def ages(index: sqlite3.Connection) -> list[tuple[str, int, int]]:
    """(agent, versions between a sample's oldest token and its training, samples)."""
    found = index.execute("SELECT agent, age, sum(num) FROM ages GROUP BY agent, age ORDER BY agent, age").fetchall()
    return [(_name(index, agent), age, num) for agent, age, num in found]


@dataclass(frozen=True, slots=True)
class Spans:
    """What fits into a picture of [low, high] seconds. num_left_out: shorter ones that are not here."""

    low: float
    high: float
    end: float
    spans: tuple[tuple[str, str, float, float, dict[str, object]], ...]
    num_left_out: int


def spans(index: sqlite3.Connection, low: float | None, high: float | None) -> Spans:
    """The longest spans that touch [low, high] seconds of the trace; None: its beginning, its end."""
    begin, end = index.execute("SELECT min(start), max(end) FROM spans").fetchone()
    if begin is None:
        return Spans(0.0, 0.0, 0.0, (), 0)
    low, high = begin if low is None else low, end if high is None else high
    (num,) = index.execute("SELECT count(*) FROM spans WHERE start <= ? AND end >= ?", (high, low)).fetchone()
    sql = "SELECT lane, name, start, end, arguments FROM spans WHERE start <= ? AND end >= ? ORDER BY end - start DESC LIMIT ?"
    found = index.execute(sql, (high, low, _MOST_SPANS)).fetchall()
    names = {number: _name(index, number) for row in found for number in row[:2]}
    return Spans(
        low,
        high,
        end,
        tuple((names[lane], names[name], start, stop, json.loads(args)) for lane, name, start, stop, args in found),
        num - len(found),
    )


def spans_end(index: sqlite3.Connection) -> float | None:
    """The last second of the trace; None: there is none."""
    return index.execute("SELECT max(end) FROM spans").fetchone()[0]


def mark_times(index: sqlite3.Connection, names: Sequence[str]) -> dict[str, float]:
    """When the marks of these names (`step 12`) stand in the trace, the first of each."""
    found = {}
    for name in names:
        row = index.execute("SELECT min(start) FROM spans WHERE name = ?", (_number(index, name),)).fetchone()
        if row[0] is not None:
            found[name] = row[0]
    return found


def publish_times(index: sqlite3.Connection) -> dict[int, float]:
    """{policy version: when the engines had it}, in seconds of the trace; of several policies the first to have it."""
    sql = "SELECT arguments, end FROM spans WHERE name = ? ORDER BY end DESC"
    found = ((json.loads(arguments), end) for arguments, end in index.execute(sql, (_number(index, "publish"),)))
    return {arguments["version"]: end for arguments, end in found if isinstance(arguments.get("version"), int)}


def warnings(index: sqlite3.Connection) -> list[tuple[int | None, str, str]]:
    """(step, kind, text): what the run said, and what could not be read of it."""
    found = index.execute("SELECT step, kind, text FROM warnings ORDER BY step DESC")
    listed = [(step, kind.decode(), loaded(text) or "") for step, kind, text in found]
    damaged = index.execute("SELECT step, damage FROM files WHERE damage IS NOT NULL ORDER BY step DESC")
    return listed + [(step, "samples", loaded(damage) or "") for step, damage in damaged]
