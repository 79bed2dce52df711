"""A run on the terminal: how far it is, what it measured last, what it warned of, the deepest problems of its last step.

Reads the files themselves, no index. Every text is made visible first: an escape sequence of a model is a picture of its
characters, and moves no cursor, colours nothing and sets no title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from marsrl.trainer.report.charts import visible
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.report import PLANS
from marsrl.trainer.report.samples_log import SampleRecord, sample_files
from marsrl.trainer.report.trees import AnsweredGroup, WholeSamples, trajectories_around
from marsrl.trainer.report.warnings_log import read_warnings
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.lock import why_held

_MOST_WARNINGS, _MOST_CHARS = 20, 600


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
    files, read = sample_files(run), WholeSamples()
    for trajectory in trajectories_around(files, last=True, read=read) if files else []:
        tree = Tree(_shown(f"{trajectory.problem_id} ({trajectory.rollout_id})", "bold"))
        _add(tree, trajectory.groups)
        console.print(tree)
    for damage in read.damages.values():
        console.print(_shown(f"warning: {damage}", "yellow"), soft_wrap=True)


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


def _add(tree: Tree, groups: Sequence[AnsweredGroup]) -> None:
    for group in groups:
        branch = tree.add(_shown(f"{group.agent}, {len(group.nodes)} samples, reads: {_cut(group.prompt)}"))
        for node in group.nodes:
            _add(branch.add(_line(node.sample, node.step)), node.groups)


def _line(sample: SampleRecord, step: int) -> Text:
    reward = "missing" if sample.reward is None else f"{sample.reward:.3g}"
    advantage = "–" if sample.advantage is None else f"{sample.advantage:+.2f}"
    verdict = "" if sample.verdict is None else f", says {'correct' if sample.verdict else 'wrong'}"
    facts = f"reward {reward}, A {advantage}{verdict}, {sample.num_tokens} tokens, {sample.finish.value}, step {step}"
    return _shown(f"{facts}\n{_cut(sample.text)}")


def _cut(text: str) -> str:
    """The beginning and the end of a text."""
    if len(text) <= _MOST_CHARS:
        return text
    half = _MOST_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
