"""Keeps the index of a run up with the run: what is new is read, what was replaced is read again.

    samples/step_N.jsonl.zst   appear whole; newest first, so that a large run can be looked at at once
    metrics.jsonl              grows by lines; one that was cut off after a resume is read again
    trace.json, warnings.jsonl are read again when they change

One process indexes a run at a time (a lock beside the index); others look at what it makes.
"""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from marsrl.rollout.types import Finish
from marsrl.trainer.report.metrics import parse_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_samples, sample_files
from marsrl.trainer.report.trace import read_trace
from marsrl.trainer.report.warnings_log import read_warnings
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.view import index_file as tables
from marsrl.trainer.view.index_file import connect, first_id, index_path, sample_id, stored

POLL_S = 1.0
_TAIL_S = 2.0  # between looks at the metrics while many samples files are read
_GONE = (-1, -1)  # mtime and size of a file that is no more: a later one of its step is of the next generation
_MOST_CHARS = 1 << 20  # of a text, searched for words
_NO_REWARD, _MOST_TENTHS = -(1 << 50), 1 << 40  # buckets of zones
_TRACE_SHARE = 0.1  # of the time at most goes into reading a growing trace again


def keep_indexed(runs: Sequence[Path]) -> None:
    """Index the runs, and again and again what is new in them. Ends with the process that started this one, however that
    ends: sqlite takes back what was half done."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "keep_indexed is what a process of its own does"
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    while True:
        for run in runs:
            index_once(run)
        time.sleep(POLL_S)


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(0)


def index_once(run: Path) -> None:
    """Bring the index up to what the run has logged by now; does nothing where another process is at it."""
    path = index_path(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with closing(connect(path, writes=True)) as index:
            _Indexer(RunDirectory(run), index).go()


@dataclass(slots=True)
class _Zone:
    """Samples of a step that are alike: how many, and between which rewards (None: they have none)."""

    num: int
    low: float | None
    high: float | None


class _Indexer:
    def __init__(self, run: RunDirectory, index: sqlite3.Connection) -> None:
        self._run = run
        self._index = index
        self._names: dict[bytes, int] = {}

    def go(self) -> None:
        self._tail()
        last = time.monotonic()
        for step, path in self._changed_files():
            with self._index:
                self._read_file(step, path)
            if time.monotonic() - last > _TAIL_S:
                self._tail()
                last = time.monotonic()

    def _tail(self) -> None:
        with self._index:
            self._read_metrics()
            self._read_trace()
            self._read_warnings()

    def _mark(self, what: str) -> str | None:
        found = self._index.execute("SELECT mark FROM read WHERE what = ?", (what,)).fetchone()
        return None if found is None else found[0].decode()

    def _set_mark(self, what: str, mark: str) -> None:
        self._index.execute("INSERT OR REPLACE INTO read VALUES (?, ?)", (what, mark))

    def _id_of(self, name: str) -> int:
        """The number of an agent, a rollout, a problem, a metric, a lane: one each."""
        key = stored(name)
        found = self._names.get(key)
        if found is None:
            row = self._index.execute("SELECT id FROM names WHERE name = ?", (key,)).fetchone()
            found = row[0] if row else self._index.execute("INSERT INTO names(name) VALUES (?)", (key,)).lastrowid
            if len(self._names) > 200_000:
                self._names.clear()
            assert found is not None
            self._names[key] = found
        return found

    # samples

    def _changed_files(self) -> Iterator[tuple[int, Path]]:
        """Files that are not indexed as they are now, newest step first. What is of files that are gone is dropped."""
        known = {row[0]: row[1:] for row in self._index.execute("SELECT step, mtime_ns, size FROM files")}
        files = sample_files(self._run)
        for step in known.keys() - files.keys():
            if known[step] != _GONE:
                with self._index:
                    self._forget(step)
                    self._index.execute(
                        "UPDATE files SET mtime_ns = ?, size = ?, num = 0, damage = NULL WHERE step = ?", (*_GONE, step)
                    )
        for step in sorted(files, reverse=True):
            state = _state(files[step])
            if state is not None and known.get(step) != state:
                yield step, files[step]

    def _forget(self, step: int) -> None:
        """Its rows; its words stay, and belong to no sample."""
        self._index.execute("DELETE FROM samples WHERE id BETWEEN ? AND ?", (first_id(step), first_id(step + 1) - 1))
        for table in ("zones", "ages"):
            self._index.execute(f"DELETE FROM {table} WHERE step = ?", (step,))

    def _read_file(self, step: int, path: Path) -> None:
        state = _state(path)
        if state is None:  # gone meanwhile
            return
        before = self._index.execute("SELECT generation FROM files WHERE step = ?", (step,)).fetchone()
        generation = before[0] + 1 if before else 0
        if before:
            self._forget(step)
        zones: dict[tuple[int, int, int], _Zone] = {}
        ages: Counter[tuple[int, int]] = Counter()
        rows, words, damage, groups = [], [], None, set[str]()
        try:
            for line, sample in enumerate(read_samples(path), start=1):
                row = self._row(sample, sample_id(step, generation, line), step)
                rows.append(row)
                words.append((row[0], _words(sample, with_prompt=sample.group_id not in groups)))
                groups.add(sample.group_id)
                _count(zones, row[1], row[4], sample.reward)
                if row[10] is not None:
                    ages[row[1], row[10]] += 1
        except ValueError as error:
            damage = stored(str(error))
        except FileNotFoundError:
            return
        self._index.executemany("INSERT INTO samples VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
        self._index.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", words)
        self._index.executemany(
            "INSERT INTO zones VALUES (?,?,?,?,?,?,?)",
            ((step, *key, zone.num, zone.low, zone.high) for key, zone in zones.items()),
        )
        self._index.executemany("INSERT INTO ages VALUES (?,?,?,?)", ((step, *key, num) for key, num in ages.items()))
        self._index.execute(
            "INSERT OR REPLACE INTO files VALUES (?,?,?,?,?,?)", (step, *state, generation, len(rows), damage)
        )

    def _row(self, sample: SampleRecord, identity: int, step: int) -> tuple:
        oldest = min((segment.version for segment in sample.segments), default=None)
        return (
            identity,
            self._id_of(sample.agent),
            self._id_of(sample.problem_id),
            self._id_of(sample.rollout_id),
            flags_of(sample),
            sample.reward,
            sample.correct,
            sample.advantage,
            sample.verdict,
            sample.num_tokens,
            None if oldest is None else max(0, step - 1 - oldest),
            stored(sample.uid),
            None if sample.parent_uid is None else stored(sample.parent_uid),
            None if sample.answer is None else stored(sample.answer[:200]),
        )

    # what is beside the samples

    def _read_metrics(self) -> None:
        state = _state(self._run.metrics)
        if state is None:
            return
        inode, read = self._run.metrics.stat().st_ino, 0
        mark = self._mark("metrics")
        if mark is not None:
            was, read = map(int, mark.split())
            if was == inode and state[1] == read:
                return
            if was != inode or state[1] < read:  # replaced: a run that went on cut off what was lost
                self._index.execute("DELETE FROM metrics")
                read = 0
        with open(self._run.metrics, "rb") as file:
            file.seek(read)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = [row for row, _ in parse_metrics(whole, self._run.metrics)]
        except ValueError as error:
            self._warn_once("metrics.jsonl", str(error))
            return
        self._index.executemany(
            "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)",
            ((self._id_of(name), row.step, value) for row in rows for name, value in row.values.items()),
        )
        self._set_mark("metrics", f"{inode} {read + len(whole)}")

    def _read_trace(self) -> None:
        state = _state(self._run.trace)
        if state is None:
            return
        mark = self._mark("trace")
        if mark is not None:
            *was, taken_s, at = mark.split()
            is_same = tuple(map(int, was)) == state
            if is_same or time.time() < float(at) + float(taken_s) / _TRACE_SHARE:
                return
        began = time.monotonic()
        try:
            spans = read_trace(self._run.trace)
        except ValueError as error:
            self._warn_once("trace.json", str(error))
            spans = []
        self._index.execute("DELETE FROM spans")
        self._index.executemany(
            "INSERT INTO spans VALUES (?,?,?,?,?)",
            (
                (self._id_of(s.lane), self._id_of(s.name), s.start_s, s.end_s, json.dumps(dict(s.arguments)))
                for s in spans
            ),
        )
        self._set_mark("trace", f"{state[0]} {state[1]} {time.monotonic() - began} {time.time()}")

    def _read_warnings(self) -> None:
        state = _state(self._run.warnings)
        if state is None or self._mark("warnings") == f"{state}":
            return
        self._index.execute("DELETE FROM warnings WHERE kind = 'said'")
        for warned in read_warnings(self._run.warnings):
            if warned.step is None:
                self._warn_once("warnings.jsonl", warned.text)
            else:
                values = warned.step, stored(warned.text)
                self._index.execute("INSERT INTO warnings VALUES (?, 'said', ?)", values)
        self._set_mark("warnings", f"{state}")

    def _warn_once(self, kind: str, text: str) -> None:
        self._index.execute("DELETE FROM warnings WHERE kind = ?", (kind,))
        self._index.execute("INSERT INTO warnings VALUES (NULL, ?, ?)", (kind, stored(text)))


def flags_of(sample: SampleRecord) -> int:
    """The sum of what it can be looked for by (index_file.FLAGS)."""
    flags = 0
    if sample.finish is Finish.LENGTH:
        flags |= tables.TRUNCATED
    if sample.verdict is not None:
        flags |= tables.VERDICT | (tables.WRONG_VERDICT if sample.parts.get("verdict") == 0 else 0)
    if sample.reward is None:
        flags |= tables.MISSING_REWARD
    if sample.finish is Finish.ERROR:
        flags |= tables.FAILED
    return flags


def _count(zones: dict[tuple[int, int, int], _Zone], agent: int, flags: int, reward: float | None) -> None:
    """Add a sample to its zone. Rewards of one tenth are together, those at the tenth itself apart: mostly 0 and 1."""
    if reward is None:
        bucket = _NO_REWARD
    else:
        tenth = math.floor(max(-_MOST_TENTHS, min(_MOST_TENTHS, 10 * reward)) + 1e-9)
        bucket = 2 * tenth + (abs(10 * reward - tenth) > 1e-9)
    zone = zones.setdefault((agent, flags, bucket), _Zone(0, reward, reward))
    zone.num += 1
    if zone.low is not None and zone.high is not None and reward is not None:
        zone.low, zone.high = min(zone.low, reward), max(zone.high, reward)


def _words(sample: SampleRecord, *, with_prompt: bool) -> str:
    """The text of a sample that is searched. The prompt stands with the first sample of its group alone: they share it."""
    prompt = sample.prompt[:_MOST_CHARS] if with_prompt else ""
    return f"{sample.text[:_MOST_CHARS]}\n{prompt}".encode("utf-8", "replace").decode()


def _state(path: Path) -> tuple[int, int] | None:
    """(mtime in ns, bytes), None where it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
