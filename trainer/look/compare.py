"""`marsrl compare`: tables in a terminal, and the viewer's page of them as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from marsrl.trainer.look.comparison import (
    Cell,
    Compared,
    final_table,
    names_of,
    read_compared,
    settings_that_differ,
)
from marsrl.trainer.look.export import export
from marsrl.trainer.look.visible import visible
from marsrl.trainer.report.cost import COLUMNS, MEANING, episode_costs
from marsrl.trainer.report.summary import Estimate
from marsrl.trainer.runs.directory import refuse_file_of_a_run

_BARS = "▁▂▃▄▅▆▇█"


def compare(paths: Sequence[str], html: str | None, console: Console) -> None:
    """Print the tables, write the page.

    Raises:
        ValueError: fewer than two runs, or one of them cannot be read.
    """
    if len(paths) < 2:
        raise ValueError(f"expected two runs or more to compare, found {len(paths)}")
    if html is not None:
        refuse_file_of_a_run(Path(html))
    runs = [read_compared(Path(path)) for path in paths]
    names = names_of([Path(path) for path in paths])
    _show(console, runs, names, final_table(runs))
    if html is not None:
        export([Path(path) for path in paths], Path(html), ("compare",))
        console.print(Text(f"page: {html}"))


def _show(console: Console, runs: Sequence[Compared], names: Sequence[str], table: dict[str, list[Cell]]) -> None:
    shown = _table(
        "last evaluations, 95% intervals over problems; in brackets: minus the first run, paired", "", *names
    )
    for row, cells in table.items():
        shown.add_row(_text(row), *(Text(_cell(cell)) for cell in cells))
    console.print(shown)
    course = _table("evaluations on the way", "run", "step", "tokens", "hours", "alone", "system", "")
    for name, run in zip(names, runs, strict=True):
        line = _sparkline([each.system.mean for _, each in run.evaluations])
        for i, (place, each) in enumerate(run.evaluations):
            place_cells = (f"{place.step}", f"{place.tokens:,.0f}", f"{place.hours:.2f}")
            values = (_estimate(each.alone), _estimate(each.system), "" if i else line)
            course.add_row(_text("" if i else name), *place_cells, *values)
    console.print(course)
    takes = _table(f"the last evaluations; {MEANING}", "", *COLUMNS)
    for name, run in zip(names, runs, strict=True):
        whole, parts = episode_costs(run.last)
        takes.add_row(_text(name), *whole.cells)
        for part in parts:
            takes.add_row(_text(f"  {part.name}"), *part.cells)
    console.print(takes)
    differs = _table("settings that differ", "", *names)
    for column in differs.columns:
        column.no_wrap, column.overflow = False, "fold"  # a list of files is long
    for key, told in settings_that_differ(runs).items():
        differs.add_row(_text(key), *map(_text, told))
    console.print(differs if differs.row_count else "no setting differs")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=Text(title), title_justify="left", pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(_text(heading), justify="right" if i else "left", no_wrap=bool(i))
    return table


def _text(text: str) -> Text:
    return Text(visible(text))


def _cell(cell: Cell) -> str:
    gap = cell.gap
    return _estimate(cell.value) + ("" if gap is None else f" [{gap}]")


def _estimate(value: Estimate | None) -> str:
    if value is None or value.mean is None:
        return "-"
    return f"{value.mean:.3f} ({value.low:.3f}-{value.high:.3f})"


def _sparkline(values: Sequence[float | None]) -> str:
    """A curve of shares in [0, 1], a character each."""
    return "".join(" " if value is None else _BARS[min(len(_BARS) - 1, int(value * len(_BARS)))] for value in values)
