"""`marsrl compare`: tables in a terminal, and a page without a script (as report.html is made)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marsrl.trainer.compare.runs import (
    AXES,
    Compared,
    Difference,
    difference,
    read_compared,
    rows_of,
    settings_that_differ,
)
from marsrl.trainer.report.charts import curves, visible
from marsrl.trainer.report.cost import COLUMNS, MEANING, episode_costs
from marsrl.trainer.report.palette import COLORS
from marsrl.trainer.report.report import page_environment
from marsrl.trainer.report.summary import Estimate
from marsrl.trainer.runs.directory import refuse_file_of_a_run, write_atomically

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Cell:
    """A row of the final table in one run: what it reached, and how far that is from the first run."""

    value: Estimate | None
    gap: Difference | None


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
    names = _names(runs, paths)
    table = final_table(runs)
    _show(console, runs, names, table)
    if html is not None:
        write_atomically(Path(html), page(runs, names, table).encode("utf-8"))
        console.print(Text(f"page: {html}"))


def final_table(runs: Sequence[Compared]) -> dict[str, list[Cell]]:
    """By row, a cell a run, each beside the first run."""
    names = dict.fromkeys(name for run in runs for name in rows_of(run.last))
    ordered = sorted(names, key=lambda name: ("alone", "system").index(name) if name in ("alone", "system") else -1)
    return {
        name: [
            Cell(rows_of(run.last).get(name), difference(runs[0], run, name) if i else None)
            for i, run in enumerate(runs)
        ]
        for name in ordered
    }


def page(runs: Sequence[Compared], names: Sequence[str], table: dict[str, list[Cell]]) -> str:
    """HTML that holds no script and loads nothing; every text is escaped."""
    rows = [name for name in table if name.rpartition("/")[2] in ("system", "alone")]
    charts = [(f"{row}: share right", [_chart(runs, names, row, axis) for axis in AXES]) for row in rows[::-1]]
    if any(run.rewards for run in runs):
        charts.append(("reward, mean of all agents", [_reward_chart(runs, names, axis) for axis in AXES]))
    return (
        page_environment(Path(__file__).parent)
        .get_template("compare.html.j2")
        .render(
            colors=_colors(names),
            name=" and ".join(names) if len(names) == 2 else f"{len(names)} runs",
            runs=names,
            table=table,
            settings=settings_that_differ(runs),
            columns=COLUMNS,
            meaning=MEANING,
            costs=[(name, *episode_costs(run.last)) for name, run in zip(names, runs, strict=True)],
            charts=charts,
        )
    )


def _chart(runs: Sequence[Compared], names: Sequence[str], row: str, axis: str) -> Markup:
    lines, bands = {}, {}
    for name, run in zip(names, runs, strict=True):
        found = [(getattr(place, axis), rows_of(each).get(row)) for place, each in run.evaluations]
        known = [(x, value) for x, value in found if value is not None and value.mean is not None]
        lines[name] = [(x, value.mean) for x, value in known]
        bands[name] = [(x, value.low, value.high) for x, value in known]
    if not any(lines.values()):
        return Markup("")
    return curves(lines, f"{row} over {axis}", colors=_colors(names), bands=bands, axis=axis)


def _reward_chart(runs: Sequence[Compared], names: Sequence[str], axis: str) -> Markup:
    lines = {
        n: [(getattr(place, axis), value) for place, value in run.rewards] for n, run in zip(names, runs, strict=True)
    }
    return curves(lines, f"reward over {axis}", colors=_colors(names), axis=axis)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """A colour a run."""
    return {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}


def _names(runs: Sequence[Compared], paths: Sequence[str]) -> list[str]:
    """The folders' names; the paths, with a number where one is named twice, where two have one name."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [path if paths.count(path) == 1 else f"{path} ({i + 1})" for i, path in enumerate(paths)]


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
