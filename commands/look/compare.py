"""`marsrl compare`: tables in a terminal, and the viewer's compare page as a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from marsrl.commands.look.comparison import Compared, names_of, numbers_of, read_compared, side_by_side
from marsrl.commands.look.export import write_page
from marsrl.trainer.report.console import table_of
from marsrl.trainer.runs.directory import refuse_file_of_a_run
from marsrl.trainer.visible import shown


def compare(paths: Sequence[str], html: str | None, console: Console) -> None:
    """Print the tables and write the page. Raises ValueError for fewer than two runs or an unreadable one."""
    if len(paths) < 2:
        raise ValueError(f"expected two runs or more to compare, found {len(paths)}")
    if html is not None:
        refuse_file_of_a_run(Path(html))
    names = names_of([Path(path) for path in paths])
    runs = [read_compared(Path(path)) for path in paths]
    comparison = shown(side_by_side(runs, names))
    _show(console, runs, comparison)
    if html is not None:
        write_page(
            Path(html), ("compare",), {"compare": comparison, "runs": [{"name": name} for name in comparison["names"]]}
        )
        console.print(Text(f"page: {html}"))


def _show(console: Console, runs: Sequence[Compared], comparison: Mapping[str, Any]) -> None:
    names = comparison["names"]
    last = table_of(
        "last evaluations, 95% intervals over problems; in brackets: minus the first run, paired", "", *names
    )
    for row in comparison["rows"]:
        last.add_row(*map(Text, (row["name"], *map(_cell, row["cells"]))))
    console.print(last)
    course = table_of("evaluations on the way", "run", "step", "tokens", "hours", "alone", "system")
    for name, run in zip(names, runs, strict=True):
        for i, (position, evaluation) in enumerate(run.evaluations):
            numbers = (f"{position.step}", f"{position.tokens:,.0f}", f"{position.hours:.2f}")
            values = (_estimate(numbers_of(found)) for found in (evaluation.alone, evaluation.system))
            course.add_row(*map(Text, ("" if i else name, *numbers, *values)))
    console.print(course)
    takes = table_of(f"the last evaluations; {comparison['meaning']}", "", *comparison["columns"])
    for run in comparison["costs"]:
        takes.add_row(*map(Text, (run["name"], *run["cells"])))
        for part in run["parts"]:
            takes.add_row(*map(Text, (f"  {part['name']}", *part["cells"])))
    console.print(takes)
    differs = table_of("settings that differ", "", *names)
    for column in differs.columns:
        column.no_wrap, column.overflow = False, "fold"  # lists of files can be long
    for key, values in comparison["settings"].items():
        differs.add_row(*map(Text, (key, *values)))
    console.print(differs if differs.row_count else "no setting differs")


def _cell(cell: Mapping[str, Any]) -> str:
    return _estimate(cell["value"]) + ("" if cell["gap"] is None else f" [{cell['gap']}]")


def _estimate(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:.3f} ({value['low']:.3f}-{value['high']:.3f})"
