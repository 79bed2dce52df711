"""Catalog of a run's logs, updated as the run writes them: samples in an in-memory DuckDB; metrics, trace, warnings as lists.

Texts stay in their files; a search for words reads them, newest step first. Nothing is written to disk.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import yaml

from marsrl.rollout.config import Settings
from marsrl.trainer.report.metrics import parse_metrics, read_warnings
from marsrl.trainer.report.samples_log import SampleRecord, read_samples
from marsrl.trainer.report.trace import Span, read_trace
from marsrl.trainer.runs.directory import RunDirectory, step_files

T = TypeVar("T")
Curves = dict[str, list[tuple[int, float | None]]]
PAGE = 50
_READ_S = 1.0  # maximum seconds for reading new samples files in one refresh; the next refresh reads the rest
_SEARCH_S = 0.15  # maximum seconds of one search for words
_LARGEST_TREE = 5000
_WINDOW = 6  # steps to search, enough for one trajectory: five agents take five steps in the agentic pipeline
_WORD = re.compile(r"[^\W_]+")

FLAGS = {
    "truncated": "finish = 'length'",
    "wrong verdict": "verdict IS NOT NULL AND element_at(parts, 'verdict')[1] = 0",
    "missing reward": "reward IS NULL",
    "error": "finish = 'error'",
    "no answer found": """answer IS NULL AND verdict IS NULL AND finish IN ('stop', 'length')
        AND coalesce(element_at(parts, 'readable')[1], 0) = 0 AND NOT ?""",
    "verdict": "verdict IS NOT NULL",
}
"""SQL condition of each flag that samples can be filtered by.

The placeholder ? is True if a program plays: the program reads the answers itself, so no answer counts as missing."""

_FILE = "read_parquet(?, hive_partitioning = false)"  # a folder step=9 must not become a column
_TABLE = """CREATE TABLE samples(step INTEGER, line INTEGER, agent VARCHAR, problem VARCHAR, rollout VARCHAR, uid VARCHAR,
    parent VARCHAR, answer VARCHAR, verdict BOOLEAN, reward DOUBLE, correct DOUBLE, advantage DOUBLE, num_tokens INTEGER,
    oldest INTEGER, flags VARCHAR[], block INTEGER)"""
_INSERT = f"""INSERT INTO samples SELECT step, line, agent, problem_id, rollout_id, uid, parent_uid, left(answer, 200), verdict,
    reward, correct, advantage, num_tokens,
    list_min(list_transform(segments, lambda s: s.version)),
    list_filter([{", ".join(f"CASE WHEN {condition} THEN '{name}' END" for name, condition in FLAGS.items())}],
    lambda flag: flag IS NOT NULL), max(line) OVER (PARTITION BY problem_id) FROM {_FILE}"""
_TEXTS = f"""SELECT line, concat_ws(chr(10), text,
    CASE WHEN row_number() OVER (PARTITION BY group_id ORDER BY line) = 1 THEN prompt END) AS words FROM {_FILE}"""


class Filter(Settings):
    """Filter of samples; a field with None, "" or () matches every sample.

    first, last: range of steps.
    low, high: range of the reward.
    words: words that must all occur in the completion, or in the prompt of a group's first sample.
    """

    agent: str | None = None
    first: int | None = None
    last: int | None = None
    low: float | None = None
    high: float | None = None
    flag: tuple[str, ...] = ()
    problem: str | None = None
    words: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A sample in a list. Its texts are in the samples file of `step`, at `line`.

    oldest: policy version of the oldest token.
    block: sort key that lists a problem's samples together: the line of the problem's last sample in the step.
    """

    step: int
    line: int
    agent: str
    problem: str
    rollout: str
    uid: str
    parent: str | None
    answer: str | None
    verdict: bool | None
    reward: float | None
    correct: float | None
    advantage: float | None
    num_tokens: int
    oldest: int | None
    flags: list[str]
    block: int


@dataclass(frozen=True, slots=True)
class Played:
    """Counts for one agent, problem and step, over the samples that pass a filter.

    num: number of samples. reward: mean reward; None if no sample has one.
    """

    step: int
    block: int
    agent: str
    num: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """At most PAGE samples.

    num: number of samples that pass the filter; None: not counted.
    next: (step, line) after which the next page begins.
    played: every agent's number of samples and mean reward for each problem on the page, in the order of play; [] if num is None.
    """

    rows: list[Row]
    num: int | None
    next: tuple[int, int] | None
    played: list[Played]


class Catalog:
    """Logs of one run. Thread-safe. `refresh` reads new samples; other files are read again when they have changed.

    refused: reason why a file is unreadable, by file name.
    """

    def __init__(self, path: Path) -> None:
        self.run = RunDirectory(path.resolve())
        self._lock = threading.RLock()
        self._db = duckdb.connect(
            ":memory:", config={"threads": 2, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
        )
        self._db.execute(_TABLE)
        self._files: dict[int, tuple[int, int]] = {}
        self._damages: dict[int, str] = {}
        self._kept: dict[str, tuple[object, Any]] = {}  # state and contents of files that are read whole
        # State of the metrics file: inode, bytes read, lines read, and the curves of these lines.
        self._curves: tuple[int, int, int, Curves] = (0, 0, 0, {})
        self.refused: dict[str, str] = {}

    def refresh(self, budget_s: float | None = _READ_S) -> None:
        """Read new samples, newest first. budget_s: seconds after which the rest is left for the next call; None: no limit."""
        began = time.monotonic()
        with self._lock:
            files, is_program = step_files(self.run.samples), self.section("external") is not None
            for step in self._files.keys() - files.keys():
                self._forget(step)
            for step in sorted(files, reverse=True):
                state = _state(files[step])
                if state is None or state == self._files.get(step):
                    continue
                self._forget(step)
                self._files[step] = state
                try:
                    self._db.execute(_INSERT, [is_program, str(files[step])])
                except duckdb.Error as error:
                    self._damages[step] = f"{files[step]} is not a file of samples ({error}); the file is damaged"
                if budget_s is not None and time.monotonic() - began >= budget_s:
                    return

    def _forget(self, step: int) -> None:
        if self._files.pop(step, None) is not None:
            self._db.execute("DELETE FROM samples WHERE step = ?", [step])
            self._damages.pop(step, None)

    def _whole(self, path: Path, read: Callable[[Path], T], empty: T) -> T:
        """Return the contents of a file, read again if it has changed; `empty` if the file is missing or unreadable."""
        with self._lock:
            state = _state(path)
            known, value = self._kept.get(path.name, (None, empty))
            if state != known:
                try:
                    value = empty if state is None else read(path)
                    self.refused.pop(path.name, None)
                except ValueError as error:
                    value, self.refused[path.name] = empty, str(error)
                self._kept[path.name] = state, value
            return value

    @property
    def curves(self) -> Curves:
        """Return [(step, value), ...] by metric; a value of None was not finite.

        Only new lines are read. The lines before a damaged one are kept.
        """
        path = self.run.metrics
        with self._lock:
            try:
                status = path.stat()
            except FileNotFoundError:
                return {}
            inode, num_read, num_lines, curves = self._curves
            if inode != status.st_ino or status.st_size < num_read:  # a resumed run removes lost steps
                num_read, num_lines, curves = 0, 0, {}
                self.refused.pop(path.name, None)
            if status.st_size > num_read:
                with path.open("rb") as file:
                    file.seek(num_read)
                    content = file.read()
                lines = content[: content.rfind(b"\n") + 1]
                # Copy the lists, because other threads may still read them.
                curves = {name: list(curve) for name, curve in curves.items()}
                try:
                    for row, _ in parse_metrics(lines, path, num_lines + 1):
                        for name, value in row.values.items():
                            curves.setdefault(name, []).append((row.step, value))
                except ValueError as error:
                    self.refused[path.name] = str(error)
                num_read, num_lines = num_read + len(lines), num_lines + lines.count(b"\n")
            self._curves = status.st_ino, num_read, num_lines, curves
            return curves

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step with metrics; None without metrics."""
        curves = self.curves.values()
        return (min(curve[0][0] for curve in curves), max(curve[-1][0] for curve in curves)) if curves else None

    @property
    def trace(self) -> list[Span]:
        return self._whole(self.run.trace, read_trace, [])

    @property
    def warnings(self) -> list[tuple[int | None, str, str]]:
        """(step, kind, text): the run's warnings, and its unreadable files."""
        said: list[tuple[int, str]] = self._whole(self.run.warnings, read_warnings, [])
        return [
            *((step, "said", text) for step, text in said),
            *((None, name, text) for name, text in self.refused.items()),
            *((step, "samples", text) for step, text in self._damages.items()),
        ]

    @property
    def counts(self) -> dict[str, int | None]:
        """Number of samples and steps read, and the last step with metrics."""
        num, steps = self._all("SELECT count(*) FROM samples")[0][0], self.steps
        return {"samples": num, "files": len(self._files), "last_metrics": None if steps is None else steps[1]}

    @property
    def sampled(self) -> tuple[int, int] | None:
        """First and last step with samples; None without samples."""
        first, last = self._all("SELECT min(step), max(step) FROM samples")[0]
        return None if first is None else (first, last)

    @property
    def agents(self) -> list[str]:
        """Agents with samples, in the order of their first samples."""
        return [name for (name,) in self._all("SELECT agent FROM samples GROUP BY agent ORDER BY min((step, line))")]

    @property
    def judges(self) -> set[str]:
        """Agents that gave a readable verdict."""
        return {name for (name,) in self._all("SELECT DISTINCT agent FROM samples WHERE verdict IS NOT NULL")}

    @property
    def ages(self) -> list[tuple[str, int, int]]:
        """(agent, age, number of samples). The age is the number of policy versions between a sample's oldest token and its
        training. A step without an update publishes no version.
        """
        curves = [curve for name, curve in self.curves.items() if name.endswith("actor/updates")]
        updates = [[step for step, value in curve if value] for curve in curves]  # steps with an update, per policy
        counts: Counter[tuple[str, int]] = Counter()
        sql = "SELECT agent, step, oldest, count(*) FROM samples WHERE oldest IS NOT NULL GROUP BY agent, step, oldest"
        for agent, step, oldest, num in self._all(sql):
            version = max((bisect_left(steps, step) for steps in updates), default=step - 1)
            counts[agent, max(0, version - oldest)] += num
        return [(agent, age, num) for (agent, age), num in sorted(counts.items())]

    @property
    def team(self) -> tuple[str, ...]:
        """Agents of the run's config.yaml, in the order of play; () if the file is unreadable."""
        return tuple(map(str, self.section("agents") or ()))

    def section(self, name: str) -> Any:
        """Return a section of the run's config.yaml; None if it is null, or the file is unreadable."""
        config: dict[str, Any] = self._whole(self.run.config, _config, {})
        return config.get(name)

    def tree(self, rollout: str) -> list[Row]:
        """Return the samples of a rollout instance, oldest first; uids and parents give the tree."""
        return self._rows("rollout = ?", [rollout], f"ORDER BY step, line LIMIT {_LARGEST_TREE}")

    def at(self, step: int, line: int) -> Row | None:
        """Return the sample on a line of a step's file."""
        found = self._rows("step = ? AND line = ?", [step, line])
        return found[0] if found else None

    def records(self, rows: Sequence[Row]) -> dict[str, SampleRecord]:
        """Read whole samples, by uid. Raises ValueError if a file is gone or damaged, or a step has been played again."""
        lines: dict[int, set[int]] = {}
        for row in rows:
            lines.setdefault(row.step, set()).add(row.line)
        files = {step: self.run.samples / f"step_{step}.parquet" for step in lines}
        records_by_uid = {each.uid: each for step, file in files.items() for each in read_samples(file, lines[step])}
        if missing := sorted({row.uid for row in rows} - records_by_uid.keys()):
            raise ValueError(f"{missing[0]} is no longer in its file: a repeated step has a new file")
        return records_by_uid

    def deepest(self, *, last: bool, num: int) -> list[str]:
        """Return the `num` rollout instances with the most agents, among those with a sample in one step.

        last: True: the last step; False: the first.
        """
        steps = sorted(self._files.keys() - self._damages.keys())
        if not steps:
            return []
        window, anchor = (steps[-_WINDOW:], steps[-1]) if last else (steps[:_WINDOW], steps[0])
        sql = """SELECT rollout FROM samples WHERE step BETWEEN ? AND ? AND rollout IN
            (SELECT rollout FROM samples WHERE step = ?) GROUP BY rollout
            ORDER BY count(DISTINCT agent) DESC, min((step, line)) LIMIT ?"""
        return [name for (name,) in self._all(sql, [window[0], window[-1], anchor, num])]

    def find(
        self,
        criteria: Filter,
        top: tuple[int, int] | None = None,
        *,
        has_top: bool = False,
        within_s: float = _SEARCH_S,
    ) -> Page:
        """Return a page of samples that pass the filter, newest step first, grouped by problem.

        top: (step, line) after which the page begins, or with which it begins if has_top. within_s: seconds after which a search
        for words returns its matches so far.

        Raises ValueError for an unknown flag, or words without a letter or digit.
        """
        if unknown := set(criteria.flag) - FLAGS.keys():
            raise ValueError(f"{sorted(unknown)} is not a filter; expected some of {', '.join(FLAGS)}")
        conditions, values = _conditions(criteria)
        num = None if criteria.words else self._all(f"SELECT count(*) FROM samples WHERE {conditions}", values)[0][0]
        page_conditions, page_values = conditions, values
        if top is not None:
            block = "coalesce((SELECT block FROM samples WHERE (step, line) = (?, ?)), 0)"
            page_conditions += f" AND (step, block, line) {'<=' if has_top else '<'} (?, {block}, ?)"
            page_values = [*values, top[0], *top, top[1]]
        if criteria.words:
            return self._search(criteria.words, page_conditions, page_values, within_s)
        page = _page(
            self._rows(page_conditions, page_values, f"ORDER BY step DESC, block DESC, line DESC LIMIT {PAGE + 1}"), num
        )
        return replace(page, played=self.played(page.rows, conditions, values))

    def played(self, rows: Sequence[Row], conditions: str = "true", values: Sequence[Any] = ()) -> list[Played]:
        """Return, for each problem and step of the rows, each agent's number of samples and mean reward."""
        if not (blocks := {(row.step, row.block) for row in rows}):
            return []
        sql = f"""SELECT step, block, agent, count(*), avg(reward) FROM samples WHERE {conditions}
            AND (step, block) IN ({", ".join(["(?, ?)"] * len(blocks))}) GROUP BY step, block, agent ORDER BY min(line), step"""
        return [Played(*each) for each in self._all(sql, [*values, *itertools.chain(*blocks)])]

    def problems(
        self, agent: str, num: int, first: int, width: int
    ) -> list[tuple[str, int, int, float | None, float | None]]:
        """Return (problem, column, samples, mean reward, share right) for the problems that the agent played in the most steps.

        The newest problems win ties. agent: "" for every agent. Column k covers `width` steps from step `first` + k * width.
        """
        sql = """WITH own AS (SELECT *, (step - ?) // ? AS k FROM samples WHERE ? IN ('', agent)),
            most AS (SELECT problem, row_number() OVER (ORDER BY count(DISTINCT step) DESC, max(step) DESC, min((step, line)))
                AS place FROM own GROUP BY problem QUALIFY place <= ?)
            SELECT problem, k, count(*), avg(reward), avg(correct) FROM own JOIN most USING (problem)
            GROUP BY place, problem, k ORDER BY place, k"""
        return self._all(sql, [first, width, agent, num])

    def _search(self, words: str, conditions: str, values: list[Any], within_s: float) -> Page:
        cut = _WORD.findall(words)
        if not cut:
            raise ValueError(f"{words[:40]!r} has no letter or digit: only words can be searched")
        patterns = [rf"(^|[^\pL\pN]){word}($|[^\pL\pN])" for word in cut]
        has_all = " AND ".join(["regexp_matches(words, ?, 'i')"] * len(cut))
        passes = f"{conditions} AND step = ? AND line IN (SELECT line FROM ({_TEXTS}) WHERE {has_all})"
        began, files, rows = time.monotonic(), step_files(self.run.samples), list[Row]()
        sql = f"SELECT step FROM samples WHERE {conditions} GROUP BY step ORDER BY step DESC"
        for place, step in enumerate(step for (step,) in self._all(sql, values) if step in files):
            if place and time.monotonic() - began >= within_s:
                return Page(rows, None, (step + 1, 0), [])
            try:
                rows += self._rows(
                    passes, [*values, step, str(files[step]), *patterns], "ORDER BY block DESC, line DESC"
                )
            except duckdb.Error:  # the file is gone, or damaged
                continue
            if len(rows) > PAGE:
                break
        return _page(rows, None)

    def _rows(self, conditions: str, values: Sequence[Any], rest: str = "") -> list[Row]:
        return [Row(*each) for each in self._all(f"SELECT * FROM samples WHERE {conditions} {rest}", values)]

    def _all(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(sql, list(values)).fetchall()


def _conditions(criteria: Filter) -> tuple[str, list[Any]]:
    bounds = {
        "agent = ?": criteria.agent,
        "problem = ?": criteria.problem,
        "step >= ?": criteria.first,
        "step <= ?": criteria.last,
        "reward >= ?": criteria.low,
        "reward <= ?": criteria.high,
    }
    used = [(condition, value) for condition, value in bounds.items() if value is not None]
    used += [("list_contains(flags, ?)", flag) for flag in criteria.flag]
    return " AND ".join(["true", *(condition for condition, _ in used)]), [value for _, value in used]


def _page(rows: Sequence[Row], num: int | None) -> Page:
    shown = list(rows[:PAGE])
    return Page(shown, num, (shown[-1].step, shown[-1].line) if len(rows) > PAGE else None, [])


def _config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _state(path: Path) -> tuple[int, int] | None:
    """Return (mtime in ns, size in bytes) of a file; None if it does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
