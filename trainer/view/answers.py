"""What the pages ask the server, and what they are told: /api/... as JSON.

Every text in an answer went through `visible`: nothing in it can hide or turn the direction of what stands around it. A text
that is to be found again (an agent's name, a problem) is sent twice where that changed it.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query

from marsrl.trainer.report.charts import visible
from marsrl.trainer.report.palette import agents_of
from marsrl.trainer.report.samples_log import read_sample, sample_files
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import why_held
from marsrl.trainer.view import measured, queries
from marsrl.trainer.view.diff import differences
from marsrl.trainer.view.index_file import FLAGS, VERSION, connect, index_path
from marsrl.trainer.view.tokens import tokens_of_sample

Number = Annotated[float | None, Query(allow_inf_nan=False)]
_MOST_CURVES = 64


def shown(value: Any) -> Any:
    """The value with all text in it made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible(str(key)): shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return value


class _Runs:
    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.names = [_name(path.resolve(), [other.resolve() for other in paths]) for path in paths]

    def path(self, run: int) -> Path:
        if not 0 <= run < len(self.paths):
            raise ValueError(f"run is {run}; there are {len(self.paths)}, from 0")
        return self.paths[run]

    @contextmanager
    def index(self, run: int) -> Iterator[sqlite3.Connection | None]:
        """None: there is none yet."""
        path = index_path(self.path(run))
        try:
            index = connect(path)
        except sqlite3.OperationalError:
            yield None
            return
        with closing(index):
            yield index if index.execute("PRAGMA user_version").fetchone()[0] == VERSION else None


def add_answers(app: FastAPI, paths: Sequence[Path]) -> None:
    """Put the routes of these runs on the application. Requests are answered in threads."""
    runs = _Runs(paths)

    @app.get("/api/runs")
    def list_runs() -> Any:
        return [_about(runs, number) for number in range(len(runs.paths))]

    @app.get("/api/samples")
    def list_samples(
        run: int,
        agent: str | None = None,
        first: int | None = None,
        last: int | None = None,
        low: Number = None,
        high: Number = None,
        flag: Annotated[list[str] | None, Query()] = None,
        problem: str | None = None,
        words: str = "",
        before: int | None = None,
        through: Annotated[str | None, Query(pattern=r"^\d{1,9}\.\d{1,9}$")] = None,
    ) -> Any:
        wanted = queries.Filter(agent, first, last, low, high, tuple(flag or ()), problem, words)
        step, _, line = (through or "").partition(".")
        linked = (int(step), int(line)) if through else None
        with runs.index(run) as index:
            page = queries.Page((), 0, None) if index is None else queries.find(index, wanted, before, linked)
        # an id is above what a browser's numbers hold exactly
        next_id = None if page.next_id is None else str(page.next_id)
        return {"rows": [_row(row) for row in page.rows], "num": page.num, "next": next_id}

    @app.get("/api/sample")
    def one_sample(run: int, step: int, line: int) -> Any:
        return _sample(runs, run, step, line)

    @app.get("/api/tokens")
    def tokens(run: int, step: int, line: int) -> Any:
        with runs.index(run) as index:
            uid = _found(index, step, line).uid
        return tokens_of_sample(RunDirectory(runs.path(run)), step, uid)

    @app.get("/api/charts")
    def charts(run: int) -> Any:
        with runs.index(run) as index:
            return [] if index is None else measured.charts(index, agents_of(RunDirectory(runs.path(run)).config))

    @app.get("/api/curves")
    def curves(run: int, name: Annotated[list[str] | None, Query(max_length=_MOST_CURVES)] = None) -> Any:
        with runs.index(run) as index:
            return [] if index is None else [measured.thinned(queries.curve(index, each)) for each in name or ()]

    @app.get("/api/spans")
    def spans(run: int, low: Number = None, high: Number = None) -> Any:
        with runs.index(run) as index:
            return None if index is None else shown(measured.spans(index, low, high))

    @app.get("/api/life")
    def life(run: int, rollout: str) -> Any:
        with runs.index(run) as index:
            agents = agents_of(RunDirectory(runs.path(run)).config)
            return None if index is None else shown(measured.life(index, rollout, agents))

    @app.get("/api/speed")
    def speed(run: int) -> Any:
        with runs.index(run) as index:
            return None if index is None else shown(measured.speed(index, RunDirectory(runs.path(run))))

    @app.get("/api/warnings")
    def warnings(run: int) -> Any:
        with runs.index(run) as index:
            return [] if index is None else shown(measured.warnings(index))


def _about(runs: _Runs, number: int) -> dict[str, Any]:
    run = RunDirectory(runs.path(number).resolve())
    about = {
        "name": visible(runs.names[number]),
        "is_going_on": bool(why_held(run)),
        "is_over": run.summary.exists(),
        "num_files": len(sample_files(run)),
        "flags": list(FLAGS),
    }
    with runs.index(number) as index:
        if index is None:
            return about | {"samples": 0, "files": 0, "agents": [], "metrics": []}
        return (
            about
            | queries.counts(index)
            | {
                "agents": _named(queries.agents(index)),
                "metrics": _named(queries.metric_names(index)),
            }
        )


def _name(run: Path, runs: Sequence[Path]) -> str:
    """As many of the last folders of its path as tell it from the others."""
    for length in range(1, len(run.parts)):
        end = run.parts[-length:]
        if sum(other.parts[-length:] == end for other in runs) <= 1:
            return "/".join(end)
    return str(run)


def _row(row: queries.Row) -> dict[str, Any]:
    """problem_key: the problem as it is, for a filter."""
    return shown(dataclasses.asdict(row)) | {"problem_key": row.problem, "rollout_key": row.rollout}


def _named(names: Iterable[str]) -> list[dict[str, str]]:
    """What is to be asked for again, and what of it can be seen."""
    return [{"key": name, "shown": visible(name)} for name in names]


def _found(index: sqlite3.Connection | None, step: int, line: int) -> queries.Row:
    """The sample on a line.

    Raises:
        ValueError: there is none.
    """
    found = None if index is None else queries.at(index, step, line)
    if found is None:
        raise ValueError(f"step {step} has no sample on line {line}, or it is not indexed yet")
    return found


def _sample(runs: _Runs, run: int, step: int, line: int) -> dict[str, Any]:
    """A sample with its texts, the tree that it stands in, and how it differs from what it repairs."""
    with runs.index(run) as index:
        found = _found(index, step, line)
        assert index is not None
        family, judges = queries.tree(index, found.rollout), queries.judges(index)
    files = sample_files(RunDirectory(runs.path(run)))
    if step not in files:
        raise ValueError(f"the samples file of step {step} is gone")
    record = read_sample(files[step], line)
    repaired = _repaired(found, family, judges)
    diff = None
    if repaired is not None and repaired.step in files:
        before = read_sample(files[repaired.step], repaired.line)
        diff = {"of": _row(repaired), "parts": differences(before.text, record.text)}
    fields = dataclasses.asdict(record)
    return {
        "row": _row(found),
        "record": shown(fields | {"finish": record.finish.value}),
        "tree": [_row(each) for each in family],
        "diff": shown(diff),
    }


def _repaired(sample: queries.Row, family: Sequence[queries.Row], judges: set[str]) -> queries.Row | None:
    """The nearest sample above it that is no verdict; None of a verdict, and of what answers the problem itself."""
    if sample.agent in judges:
        return None
    by_uid, seen = {each.uid: each for each in family}, {sample.uid}
    above = by_uid.get(sample.parent or "")
    while above is not None and above.agent in judges and above.uid not in seen:
        seen.add(above.uid)  # a damaged log may have a ring of parents
        above = by_uid.get(above.parent or "")
    return above if above is not None and above.uid not in seen else None
