"""The viewer's API: queries ("questions") of the pages, served at /api/<question> and embedded in exported pages.

Every text in an answer has passed `visible`, which escapes invisible characters and changes of writing direction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, validate_call

from marsrl.commands.look.catalog import FLAGS, Catalog, Filter, Page, Row
from marsrl.commands.look.comparison import names_of, numbers_of, read_compared, side_by_side
from marsrl.commands.look.measured import axes, charts, curves, life, problems, spans, speed, warnings
from marsrl.rollout.types import FloatArray
from marsrl.trainer.report.summary import Estimate, compared, load_summary, of_other_inputs
from marsrl.trainer.report.token_log import TokenRecord, read_tokens
from marsrl.trainer.runs.directory import step_files
from marsrl.trainer.runs.existing_run import flat
from marsrl.trainer.runs.lock import standing
from marsrl.trainer.visible import Key, shown

LISTS = ("flag", "name")
"""Parameters that a question may repeat."""

MOST_CHARS = 200_000  # maximum characters of a text to compare; a longer text would take too long
_MOST_WORDS = 3000  # maximum words of a changed passage that is compared word by word
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_LISTED = 40

Part = tuple[str, str]
"""(mark, text): the mark is "=" for text in both versions, "-" only in the first, "+" only in the second."""


class Api:
    """Answers to questions about runs, which are named by index. Answers are JSON. Invalid questions raise ValueError.

    questions: functions by question; their arguments may be strings from a URL.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.catalogs = [Catalog(path) for path in paths]
        self.names = names_of(paths)
        run_questions = (
            overview,
            samples,
            sample,
            tree,
            tokens,
            problems,
            charts,
            curves,
            axes,
            spans,
            life,
            speed,
            warnings,
        )
        self.questions: dict[str, Callable[..., Any]] = {
            "runs": _question(self.runs),
            "compare": _question(self.compare),
            **{function.__name__: partial(self._of, _question(function)) for function in run_questions},
        }

    def _of(self, function: Callable[..., Any], /, run: int | str = "not given", **asked: Any) -> Any:
        if str(run) not in map(str, range(len(self.catalogs))):
            raise ValueError(f"run is {run}; expected a number from 0 to {len(self.catalogs) - 1}")
        return function(self.catalogs[int(run)], **asked)

    def runs(self) -> list[dict[str, Any]]:
        """Update the catalogs and return all runs."""
        for catalog in self.catalogs:
            catalog.refresh()
        return [
            {
                "name": name,
                "standing": standing(catalog.run),
                "num_files": len(step_files(catalog.run.samples)),
                "flags": list(FLAGS),
                "agents": [{"key": Key(agent), "shown": agent} for agent in catalog.agents],
                **catalog.counts,
            }
            for name, catalog in zip(self.names, self.catalogs, strict=True)
        ]

    def compare(self) -> dict[str, Any]:
        """Return all runs side by side, as in `marsrl compare`; {why_not: reason} if a run has no evaluation or is unreadable."""
        try:
            return side_by_side([read_compared(catalog.run.path) for catalog in self.catalogs], self.names)
        except ValueError as error:
            return {"why_not": str(error)}


def _question(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to check its arguments and make all text of its result visible."""
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    return lambda *given, **asked: shown(checked(*given, **asked))


def overview(catalog: Catalog) -> dict[str, Any]:
    """Return the content of the overview page. Without summary.json, rows and facts are empty.

    rows: accuracies before and after training, one per agent. confusions: confusion matrices of agents that give verdicts.
    facts: (key of summary.json, text). config: text of config.yaml. num_non_finite: number of non-finite metric values.
    """
    run = catalog.run
    page: dict[str, Any] = {
        "summary": None,
        "why_not": None,
        "rows": [],
        "confusions": [],
        "facts": [],
        "config": run.config.read_text("utf-8", "replace") if run.config.exists() else None,
        "last_step": catalog.counts["last_metrics"],
        "num_non_finite": sum(value is None for curve in catalog.curves.values() for _, value in curve),
    }
    try:
        summary = load_summary(run.summary)
    except FileNotFoundError:
        return page
    except ValueError as error:
        return page | {"why_not": str(error)}
    evaluated = compared(summary.before, summary.after) if summary.before or summary.after else []
    breaks = [
        (f"{name} breaks a right one", getattr(before, "breaks", None), getattr(after, "breaks", None))
        for name, before, after in evaluated
    ]
    rows = [*evaluated, *(row for row in breaks if row[1] or row[2])]
    recorded = summary.model_dump(mode="json", by_alias=True, exclude={"before", "after"})
    engine = f"{summary.engine.library} {summary.engine.version}"
    return page | {
        "summary": f"{summary.task} · {summary.steps} steps · {engine} · {summary.device}",
        "rows": [_estimates(*row, is_bar=row in evaluated) for row in rows],
        "confusions": [
            {"title": f"{name} {title}", "before": _counts(before, field), "after": _counts(after, field)}
            for name, before, after in evaluated
            for title, field in (("on fixed solutions", "confusion"), ("in the loop", "loop_confusion"))
            if _counts(before, field) or _counts(after, field)
        ],
        "facts": [(key, _fact(value)) for key, value in flat(recorded).items() if value is not None],
    }


def _estimates(name: str, before: Estimate | None, after: Estimate | None, *, is_bar: bool) -> dict[str, Any]:
    return {
        "name": name,
        "before": numbers_of(before),
        "after": numbers_of(after),
        "is_of_other_inputs": of_other_inputs(before, after),
        "is_bar": is_bar,
    }


def _counts(estimate: Estimate | None, field: str) -> dict[str, int] | None:
    found = getattr(estimate, field, None)
    return None if found is None else found.model_dump()


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return " · ".join(map(_fact, value))
    if value is None:
        return "–"
    return f"{value:,.6g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def samples(catalog: Catalog, before: str = "", through: str = "", **wanted: Any) -> dict[str, Any]:
    """Return a page of samples that pass a filter, newest first, after `before` or starting with `through` (both step.line)."""
    top = _place(before) if before else None
    if has_top := bool(through and not before):
        top = place if catalog.at(*(place := _place(through))) else None
    return listing(catalog.find(Filter(**wanted), top, has_top=has_top))


def listing(page: Page) -> dict[str, Any]:
    """Return a page of samples as JSON. next: position of the next page, as step.line."""
    following = None if page.next is None else f"{page.next[0]}.{page.next[1]}"
    return dataclasses.asdict(page) | {"rows": [_row(row) for row in page.rows], "next": following}


def sample(catalog: Catalog, step: int, line: int) -> dict[str, Any]:
    """Return a sample with its texts and the changes that it makes to the solution it repairs."""
    row = _found(catalog, step, line)
    family = catalog.tree(row.rollout)
    repaired, diff = _repaired(row, family, catalog.judges), None
    records = catalog.records([row] if repaired is None else [row, repaired])
    if repaired is not None:
        parts = differences(records[repaired.uid].text, records[row.uid].text)
        diff = {"of": _row(repaired), "parts": parts}
    return {
        "row": _row(row),
        "record": dataclasses.asdict(records[row.uid]),
        "sessions": catalog.section("external") is not None,
        "diff": diff,
    }


def tree(catalog: Catalog, rollout: str) -> list[dict[str, Any]]:
    """Return the samples of a rollout instance."""
    return [_row(each) for each in catalog.tree(rollout)]


def tokens(catalog: Catalog, step: int, line: int) -> dict[str, Any]:
    """Return a sample's tokens.

    kept: the sample's token columns; None if its tokens were not logged. near: the nearest step with logged tokens, and that
    step's samples, the same agent's first.

    Raises ValueError if the step's file is damaged.
    """
    row, logged = _found(catalog, step, line), _kept_tokens(step_files(catalog.run.tokens), step)
    record = next((candidate for candidate in logged if (candidate.step, candidate.uid) == (step, row.uid)), None)
    near = sorted(logged, key=lambda candidate: (candidate.agent != row.agent, candidate.line))[:_MOST_LISTED]
    samples = [{"line": candidate.line, "agent": candidate.agent} for candidate in near]
    return {
        "kept": None if record is None else _columns(record),
        "near": {"step": near[0].step, "samples": samples} if near else None,
    }


def _place(text: str) -> tuple[int, int]:
    step, dot, line = text.partition(".")
    if not (dot and step.isdecimal() and line.isdecimal() and len(text) < 20):
        raise ValueError(f"{text[:40]!r} is not a sample; expected step.line")
    return int(step), int(line)


def _row(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"problem_key": Key(row.problem), "rollout_key": Key(row.rollout)}


def _found(catalog: Catalog, step: int, line: int) -> Row:
    row = catalog.at(step, line)
    if row is None:
        raise ValueError(f"step {step} has no sample on line {line}, or it has not been read yet")
    return row


def _repaired(sample: Row, family: Sequence[Row], judges: set[str]) -> Row | None:
    """Return the nearest ancestor that is not a verdict; None for a verdict or a direct answer to the problem."""
    if sample.agent in judges:
        return None
    by_uid, seen = {each.uid: each for each in family}, {sample.uid}
    above = by_uid.get(sample.parent or "")
    while above is not None and above.agent in judges and above.uid not in seen:
        seen.add(above.uid)  # parents may form a cycle in a damaged log
        above = by_uid.get(above.parent or "")
    return above if above is not None and above.uid not in seen else None


def differences(before: str, after: str) -> list[Part] | None:
    """Split two texts into common, removed and added parts; None if the texts are too long.

    Joining all parts except "+" gives `before`; joining all except "-" gives `after`.
    """
    if max(len(before), len(after)) > MOST_CHARS:
        return None
    parts: list[Part] = []
    for part in _lines(before, after):
        if part[1] and parts and parts[-1][0] == part[0]:
            parts[-1] = (part[0], parts[-1][1] + part[1])
        elif part[1]:
            parts.append(part)
    return parts


def _lines(before: str, after: str) -> Iterator[Part]:
    for old, new, is_same in _matched(_LINE.findall(before), _LINE.findall(after)):
        words = _PIECE.findall(old), _PIECE.findall(new)
        if is_same:
            yield "=", new
        elif max(map(len, words)) > _MOST_WORDS:
            yield from (("-", old), ("+", new))
        else:
            for some, others, is_equal in _matched(*words):
                yield from (("=", others),) if is_equal else (("-", some), ("+", others))


def _matched(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield corresponding passages (before, after, True if equal), in order."""
    matcher = SequenceMatcher(None, before, after)  # with autojunk: otherwise repeated lines take quadratic time
    for kind, a, b, c, d in matcher.get_opcodes():
        yield "".join(before[a:b]), "".join(after[c:d]), kind == "equal"


def _kept_tokens(files: Mapping[int, Path], step: int) -> list[TokenRecord]:
    """Read the kept tokens of the step, or else of the nearest step with a readable file.

    Raises ValueError only if the step's own file is damaged.
    """
    for number in sorted(files, key=lambda number: (abs(number - step), number)):
        try:
            return read_tokens(files[number])
        except ValueError:  # the file is damaged, or missing while its step is repeated
            if number == step and files[number].exists():
                raise
    return []


def _columns(record: TokenRecord) -> dict[str, Any]:
    """Return a list for each column. clipped, gated, masked: indices of the tokens with that mark."""
    starts = [0, *record.ends[:-1].tolist()]
    return {
        "policy": record.policy,
        "update": record.update,
        "segments": [[segment.start, segment.end, segment.version] for segment in record.segments],
        "text": [record.text[start:end] for start, end in zip(starts, record.ends.tolist(), strict=False)],
        "ids": record.token_ids.tolist(),
        "given": np.flatnonzero(~record.is_sampled).tolist(),
        "rollout": _numbers(record.rollout_logprobs),
        "trainer": _numbers(record.logprobs),
        "entropy": _numbers(record.entropy),
        "clipped": np.flatnonzero(record.is_clipped).tolist(),
        "gated": np.flatnonzero(record.is_gated).tolist(),
        "masked": np.flatnonzero(record.is_masked).tolist(),
    }


def _numbers(values: FloatArray) -> Sequence[float | None]:
    """Round values to six digits; None for missing or non-finite ones."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]
