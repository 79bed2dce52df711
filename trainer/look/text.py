"""A run on the terminal: how far it is, what it measured last, what it warned of, the deepest problems of its last step.

Every text is made visible first: an escape sequence of a model is a picture of its
characters, and moves no cursor, colours nothing and sets no title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from marsrl.trainer.look.catalog import Catalog, Row
from marsrl.trainer.look.chart_plans import PLANS
from marsrl.trainer.look.visible import shorten, visible
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.samples_log import SampleRecord, read_lines, sample_files
from marsrl.trainer.report.warnings_log import read_warnings
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import why_held

_MOST_WARNINGS, _MOST_CHARS, _MOST_PROBLEMS = 20, 600, 3


def print_run(path: Path, console: Console) -> None:
    """Everything of one run, in the order of the module's first line.

    Raises:
        ValueError: metrics.jsonl is damaged; says which line.
    """
    run = RunDirectory(path.resolve())
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    standing = "going on" if why_held(run) else "over" if run.summary.exists() else "not finished"
    last = f", last step logged: {rows[-1].step}" if rows else ", no step has been logged yet"
    console.print(_shown(f"{run.path.name}: {standing}{last}", "bold"), soft_wrap=True)
    if rows:
        console.print(_table(rows[0].values, rows[-1].values, (rows[0].step, rows[-1].step)))
    for warned in read_warnings(run.warnings)[-_MOST_WARNINGS:]:
        place = "" if warned.step is None else f"step {warned.step}: "
        console.print(_shown(f"warning: {place}{warned.text}", "yellow"), soft_wrap=True)
    catalog = Catalog(run.path)
    catalog.refresh(budget_s=None)
    for rollout in catalog.deepest(last=True, num=_MOST_PROBLEMS):
        family = catalog.tree(rollout)
        tree = Tree(_shown(f"{family[0].problem} ({rollout})", "bold"))
        _add(tree, family, _texts(run, family))
        console.print(tree)
    for step, kind, text in catalog.warnings:
        if kind == "samples":
            console.print(_shown(f"warning: step {step}: {text}", "yellow"), soft_wrap=True)


def _shown(text: str, style: str = "") -> Text:
    return Text(visible(text), style=style)


def _table(first: Mapping[str, float | None], last: Mapping[str, float | None], steps: tuple[int, int]) -> Table:
    """The metrics of the report's charts, at the first step and now."""
    table = Table(pad_edge=False)
    for heading in ("", f"step {steps[0]}", f"step {steps[1]}"):
        table.add_column(heading, justify="right" if heading else "left")
    for plan in PLANS:
        for name in last:
            if plan.label(name) is not None:
                table.add_row(_shown(name), _number(first.get(name)), _number(last[name]))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _texts(run: RunDirectory, rows: Sequence[Row]) -> dict[str, SampleRecord]:
    """The whole samples, by uid."""
    files = sample_files(run)
    lines: dict[int, list[Row]] = {}
    for row in rows:
        lines.setdefault(row.step, []).append(row)
    read = {step: read_lines(files[step], [row.line for row in own]) for step, own in lines.items()}
    return {row.uid: read[row.step][row.line] for row in rows}


def _line(sample: SampleRecord, step: int) -> Text:
    reward = "missing" if sample.reward is None else f"{sample.reward:.3g}"
    advantage = "–" if sample.advantage is None else f"{sample.advantage:+.2f}"
    verdict = "" if sample.verdict is None else f", says {'correct' if sample.verdict else 'wrong'}"
    facts = f"reward {reward}, A {advantage}{verdict}, {sample.num_tokens} tokens, {sample.finish.value}, step {step}"
    return _shown(f"{facts}\n{shorten(sample.text, _MOST_CHARS)}")


def _add(tree: Tree, rows: Sequence[Row], texts: Mapping[str, SampleRecord]) -> None:
    """Each group below the sample that it is about; at the top, those whose parent is not here."""
    below: dict[str | None, dict[str, list[Row]]] = {}
    for row in rows:
        parent = row.parent if row.parent in texts else None
        below.setdefault(parent, {}).setdefault(texts[row.uid].group_id, []).append(row)

    def add(branch: Tree, parent: str | None) -> None:
        # pop: each sample has one place, and a damaged log with a ring of parents cannot make us go round
        for group in below.pop(parent, {}).values():
            first = texts[group[0].uid]
            members = branch.add(
                _shown(f"{first.agent}, {len(group)} samples, reads: {shorten(first.prompt, _MOST_CHARS)}")
            )
            for row in group:
                add(members.add(_line(texts[row.uid], row.step)), row.uid)

    add(tree, None)
