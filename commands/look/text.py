"""A run on the terminal: progress, metrics, warnings, and those sample trees of its last step that have the most agents.

Every text passes `literal` first, which prints a model's escape sequences as characters, so that they cannot move the cursor, set
colours or change the title.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from marsrl.commands.look.catalog import Catalog, Row
from marsrl.commands.look.measured import PLANS
from marsrl.trainer.report.console import literal, table_of
from marsrl.trainer.report.samples_log import SampleRecord
from marsrl.trainer.runs.lock import standing
from marsrl.trainer.visible import shorten

_MOST_WARNINGS, _MOST_CHARS, _MOST_PROBLEMS = 20, 600, 3


def print_run(path: Path, console: Console) -> None:
    """Print one run: progress, first and last metrics, warnings, and the last step's largest sample trees (by agents)."""
    catalog = Catalog(path)
    catalog.refresh(budget_s=None)
    run, steps = catalog.run, catalog.steps
    last = f"last step logged: {steps[1]}" if steps is not None else "no step has been logged yet"
    console.print(literal(f"{run.path.name}: {standing(run)}, {last}", "bold"), soft_wrap=True)
    if steps is not None:
        console.print(_table(catalog, *steps))
    for step, _, text in catalog.warnings[-_MOST_WARNINGS:]:
        place = "" if step is None else f"step {step}: "
        console.print(literal(f"warning: {place}{text}", "yellow"), soft_wrap=True)
    for rollout in catalog.deepest(last=True, num=_MOST_PROBLEMS):
        family = catalog.tree(rollout)
        tree = Tree(literal(f"{family[0].problem} ({rollout})", "bold"))
        _add(tree, family, catalog.records(family))
        console.print(tree)


def _table(catalog: Catalog, first: int, last: int) -> Table:
    """Return a table of the metrics that PLANS charts, at the first and the last step."""
    table = table_of("", "", f"step {first}", f"step {last}")
    for plan in PLANS:
        for name, curve in catalog.curves.items():
            if plan.label(name) is not None and curve[-1][0] == last:
                began = curve[0][1] if curve[0][0] == first else None
                table.add_row(literal(name), _number(began), _number(curve[-1][1]))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _line(sample: SampleRecord, step: int) -> Text:
    reward = "missing" if sample.reward is None else f"{sample.reward:.3g}"
    advantage = "–" if sample.advantage is None else f"{sample.advantage:+.2f}"
    verdict = "" if sample.verdict is None else f", says {'correct' if sample.verdict else 'wrong'}"
    fate = f", {sample.fate}" if sample.fate else ""
    facts = (
        f"reward {reward}, A {advantage}{verdict}, {sample.num_tokens} tokens, {sample.finish.value}{fate}, step {step}"
    )
    return literal(f"{facts}\n{shorten(sample.text, _MOST_CHARS)}")


def _add(tree: Tree, rows: Sequence[Row], texts: Mapping[str, SampleRecord]) -> None:
    """Add each group below its parent sample, or at the top level if the parent is missing."""
    below: dict[str | None, dict[str, list[Row]]] = {}
    for row in rows:
        parent = row.parent if row.parent in texts else None
        below.setdefault(parent, {}).setdefault(texts[row.uid].group_id, []).append(row)

    def add(branch: Tree, parent: str | None) -> None:
        # `pop` adds each sample once, even if a damaged log has a cycle of parents.
        for group in below.pop(parent, {}).values():
            first = texts[group[0].uid]
            members = branch.add(
                literal(f"{first.agent}, {len(group)} samples, reads: {shorten(first.prompt, _MOST_CHARS)}")
            )
            for row in group:
                add(members.add(_line(texts[row.uid], row.step)), row.uid)

    add(tree, None)
