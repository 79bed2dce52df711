"""The viewer's API: /api/<method of Answers> on the server, and the content of an exported page.

Every text in an answer went through `visible`: nothing in it can hide or turn the direction of what stands around it. A text
that is to be found again (an agent's name, a problem) is sent twice where that changed it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import validate_call

from marsrl.trainer.look import measured
from marsrl.trainer.look.catalog import FLAGS, Catalog, Filter, Row
from marsrl.trainer.look.comparison import names_of, side_by_side
from marsrl.trainer.look.diff import differences
from marsrl.trainer.look.overview import overview
from marsrl.trainer.look.tokens import tokens_of_sample
from marsrl.trainer.look.visible import shown, visible
from marsrl.trainer.report.samples_log import read_lines, sample_files
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import why_held

LISTS = ("flag", "name")
"""Parameters that a question can have several times."""


class Answers:
    """Answers about some runs, named by their place. Values are JSON. Wrong questions raise ValueError."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.catalogs = [Catalog(path) for path in paths]
        self.names = names_of(paths)

    @property
    def questions(self) -> dict[str, Callable[..., Any]]:
        """By the name that the pages use; arguments may be strings of a URL."""
        names = "runs overview samples sample tokens charts curves spans life speed warnings compare"
        return {name: validate_call(getattr(self, name)) for name in names.split()}

    def of(self, run: int) -> Catalog:
        if not 0 <= run < len(self.catalogs):
            raise ValueError(f"run is {run}; there are {len(self.catalogs)}, from 0")
        return self.catalogs[run]

    def runs(self) -> Any:
        for catalog in self.catalogs:
            catalog.refresh()
        return [
            {
                "name": visible(name),
                "is_going_on": _is_going_on(catalog.run),
                "is_over": catalog.run.summary.exists(),
                "num_files": len(sample_files(catalog.run)),
                "flags": list(FLAGS),
                "agents": _named(catalog.agents),
                **catalog.counts,
            }
            for name, catalog in zip(self.names, self.catalogs, strict=True)
        ]

    def overview(self, run: int) -> Any:
        return shown(overview(self.of(run)))

    def samples(
        self,
        run: int,
        agent: str | None = None,
        first: int | None = None,
        last: int | None = None,
        low: float | None = None,
        high: float | None = None,
        flag: Sequence[str] = (),
        problem: str | None = None,
        words: str = "",
        before: str | None = None,
        through: str | None = None,
    ) -> Any:
        """The newest samples that pass, a page; below `before`, or from `through` on (each step.line)."""
        if not all(bound is None or math.isfinite(bound) for bound in (low, high)):
            raise ValueError(f"low is {low} and high is {high}; expected finite numbers")
        top = _place(before) if before else None
        if through and not before:
            step, line = _place(through)
            top = (step, line + 1) if self.of(run).at(step, line) else None
        page = self.of(run).find(Filter(agent, first, last, low, high, tuple(flag), problem, words), top)
        following = None if page.next is None else f"{page.next[0]}.{page.next[1]}"
        return {"rows": [_row(row) for row in page.rows], "num": page.num, "next": following}

    def sample(self, run: int, step: int, line: int) -> Any:
        """A sample with its texts, the tree that it stands in, and how it differs from what it repairs."""
        catalog = self.of(run)
        found = _found(catalog, step, line)
        family = catalog.tree(found.rollout)
        files = sample_files(catalog.run)
        if step not in files:
            raise ValueError(f"the samples file of step {step} is gone")
        record = read_lines(files[step], [line])[line]
        repaired = _repaired(found, family, catalog.judges)
        diff = None
        if repaired is not None and repaired.step in files:
            before = read_lines(files[repaired.step], [repaired.line])[repaired.line]
            diff = {"of": _row(repaired), "parts": differences(before.text, record.text)}
        fields = dataclasses.asdict(record)
        return {
            "row": _row(found),
            "record": shown(fields | {"finish": record.finish.value}),
            "tree": [_row(each) for each in family],
            "diff": shown(diff),
        }

    def tokens(self, run: int, step: int, line: int) -> Any:
        catalog = self.of(run)
        return tokens_of_sample(catalog.run, step, _found(catalog, step, line).uid)

    def charts(self, run: int) -> Any:
        return measured.charts(self.of(run))

    def curves(self, run: int, name: Sequence[str] = ()) -> Any:
        return [measured.thinned(self.of(run).curve(each)) for each in name]

    def spans(self, run: int, low: float | None = None, high: float | None = None) -> Any:
        return shown(measured.spans(self.of(run), low, high))

    def life(self, run: int, rollout: str) -> Any:
        return shown(measured.life(self.of(run), rollout))

    def speed(self, run: int) -> Any:
        return shown(measured.speed(self.of(run)))

    def warnings(self, run: int) -> Any:
        return shown(measured.warnings(self.of(run)))

    def compare(self) -> Any:
        """All runs side by side, as `marsrl compare` does; why_not: one was not evaluated, or cannot be read."""
        try:
            return shown(side_by_side([catalog.run.path for catalog in self.catalogs], self.names))
        except ValueError as error:
            return {"why_not": visible(str(error))}


def _is_going_on(run: RunDirectory) -> bool:
    """Is another process at it? A run that writes its own report is over."""
    held = why_held(run)
    return bool(held) and f" process {os.getpid()} on " not in held


def _place(text: str) -> tuple[int, int]:
    step, dot, line = text.partition(".")
    if not (dot and step.isdecimal() and line.isdecimal() and len(text) < 20):
        raise ValueError(f"{text[:40]!r} is no sample; expected step.line")
    return int(step), int(line)


def _row(row: Row) -> dict[str, Any]:
    """problem_key, rollout_key: as they are, to ask for."""
    return shown(dataclasses.asdict(row)) | {"problem_key": row.problem, "rollout_key": row.rollout}


def _named(names: Iterable[str]) -> list[dict[str, str]]:
    """Each name as the key to ask for it by, and as it is shown."""
    return [{"key": name, "shown": visible(name)} for name in names]


def _found(catalog: Catalog, step: int, line: int) -> Row:
    found = catalog.at(step, line)
    if found is None:
        raise ValueError(f"step {step} has no sample on line {line}, or it has not been read yet")
    return found


def _repaired(sample: Row, family: Sequence[Row], judges: set[str]) -> Row | None:
    """The nearest sample above it that is no verdict; None of a verdict, and of what answers the problem itself."""
    if sample.agent in judges:
        return None
    by_uid, seen = {each.uid: each for each in family}, {sample.uid}
    above = by_uid.get(sample.parent or "")
    while above is not None and above.agent in judges and above.uid not in seen:
        seen.add(above.uid)  # a damaged log may have a ring of parents
        above = by_uid.get(above.parent or "")
    return above if above is not None and above.uid not in seen else None
