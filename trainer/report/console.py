"""Terminal output of a run: progress bars, messages and the final table. Nothing else draws on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from marsrl.trainer.report.cost import COLUMNS, MEANING, episode_costs
from marsrl.trainer.report.summary import AtK, Estimate, Evaluation, Summary, compared, of_other_inputs
from marsrl.trainer.report.warnings_log import append_warning

PLAIN_INTERVAL_S = 15.0  # between lines of a bar that goes to a file: a 10-minute run stays under a hundred lines


class Bar:
    """Progress of one thing. Counts, and says its rate, the time left and a note (a loss); how it is shown is the subclass's.

    Of a thing that turns out to have nothing to do (nobody counts) nothing is shown.
    """

    def __init__(self, description: str, total: int | None, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.completed = 0
        self.note = ""
        self.is_begun = False
        self._start = time.monotonic()

    def advance(self, count: int = 1, note: str | None = None) -> None:
        self.update(self.completed + count, note)

    def update(self, completed: int, note: str | None = None) -> None:
        """Set how much is done, in `unit`; note None keeps the last one."""
        self.completed = completed
        self.note = self.note if note is None else note
        self.is_begun = True
        self._show()

    def played(self, num_over: int, total: int, num_tokens: int) -> None:
        """Progress of an evaluation (EvaluationPlay)."""
        self.total = total
        self.update(num_over, f"{num_tokens:,} tokens")

    def rate(self) -> str:
        elapsed_s = time.monotonic() - self._start
        if elapsed_s <= 0 or not self.unit:
            return ""
        rate = self.completed / elapsed_s
        return f"{rate:,.0f} {self.unit}/s" if rate >= 9.95 else f"{rate:.1f} {self.unit}/s"

    def left(self) -> str:
        """Remaining time at the present rate; empty if unknown."""
        if self.total is None or not 0 < self.completed < self.total:
            return ""
        left_s = (time.monotonic() - self._start) * (self.total - self.completed) / self.completed
        return f"{left_s / 60:.0f} min left" if left_s >= 100 else f"{left_s:.0f} s left"

    def finish(self) -> None:
        """The thing is over."""

    def _show(self) -> None:
        """Quiet."""


class _RichBar(Bar):
    def __init__(self, description: str, total: int | None, unit: str, progress: Progress) -> None:
        super().__init__(description, total, unit)
        self._progress = progress
        self._task: TaskID = progress.add_task(description, total=total, rate="", left="", note="")

    def _show(self) -> None:
        self._progress.update(
            self._task, completed=self.completed, total=self.total, rate=self.rate(), left=self.left(), note=self.note
        )

    def finish(self) -> None:
        if not self.is_begun:
            self._progress.remove_task(self._task)


class _PlainBar(Bar):
    def __init__(self, description: str, total: int | None, unit: str, out: Console) -> None:
        super().__init__(description, total, unit)
        self._out, self._last = out, time.monotonic()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._last >= PLAIN_INTERVAL_S:
            self._last = now
            self.print_line()

    def finish(self) -> None:
        if self.is_begun:
            self.print_line()

    def print_line(self) -> None:
        of = f"/{self.total:,}" if self.total is not None else ""
        parts = [
            f"{self.description}: {self.completed:,}{of} {self.unit}".rstrip(),
            self.rate(),
            self.left(),
            self.note,
        ]
        self._out.print(Text("  ".join(part for part in parts if part)), soft_wrap=True)


class RunConsole:
    """The console of one rank: rank 0 draws (bars on a terminal, a line now and then elsewhere), others are silent.

        console = RunConsole(rank=0)
        with console.progress("warm start", total=650, unit="steps") as bar:
            bar.advance(note="loss 0.31")
        console.results(summary)

    Text is printed as it is: a `[red]` that a model or a path holds is no markup here.
    """

    def __init__(self, rank: int = 0, stream: TextIO | None = None) -> None:
        self.is_quiet = rank != 0
        self._console = Console(file=stream or sys.stderr, quiet=self.is_quiet, highlight=False)
        self._kept: Path | None = None
        self.step = 0  # of the run, as its warnings say it

    def message(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)

    def keep_warnings(self, path: Path) -> None:
        """From now on warnings are appended to this file too, with the step that they were given in."""
        self._kept = path

    def warning(self, text: str) -> None:
        if self._kept is not None and not self.is_quiet:
            append_warning(self._kept, self.step, text)
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        """A bar for the body. total None: not known, only the count and the rate are shown."""
        if self.is_quiet:
            yield Bar(description, total, unit)
        elif self._console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                TextColumn("{task.fields[note]}", markup=False),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self._console) as progress:
                bar: Bar = _RichBar(description, total, unit, progress)
                yield bar
                bar.finish()
        else:
            bar = _PlainBar(description, total, unit, self._console)
            yield bar
            bar.finish()

    def results(self, summary: Summary) -> None:
        """The table before / after with 95% intervals; nothing where nothing was evaluated."""
        if summary.before is None and summary.after is None:
            return
        title = Text(f"{summary.name}: held-out problems, 95% intervals over problems")
        table = Table(title=title, title_justify="left", pad_edge=False)
        for heading in ("", "before", "after", "change"):
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        rows = compared(summary.before, summary.after)
        if any(of_other_inputs(before, after) for _, before, after in rows):
            table.caption, table.caption_justify = (
                Text("* on other inputs than before (n): not the same problems"),
                "left",
            )
        for name, before, after in rows:
            table.add_row(name, _cell(before), _cell(after), _change(before, after))
        self._console.print(table)

    def teams(self, evaluated: Sequence[tuple[str, Evaluation, float]]) -> None:
        """A table of (name, evaluation, its seconds): how good each team is, and what an episode of it takes, by agent."""
        title = Text(f"{MEANING}; seconds: of the whole evaluation")
        table = Table(title=title, title_justify="left", pad_edge=False)
        for heading in ("", "correct", *COLUMNS, "seconds"):
            table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
        for name, evaluation, seconds in evaluated:
            whole, parts = episode_costs(evaluation)
            table.add_row(Text(name), _cell(whole.correct), *whole.cells, f"{seconds:.1f}")
            for row, found in _rows_at(evaluation):
                table.add_row(Text(f"  {row}"), _cell(found))
            for part in parts:
                table.add_row(Text(f"  {part.name}"), "" if part.correct is None else _cell(part.correct), *part.cells)
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, 160)
        self._console.print(table)


def _rows_at(evaluation: Evaluation) -> list[tuple[str, Estimate]]:
    """Each set's system and first agent alone; of several draws, what the most of them are worth."""
    rows = []
    for prefix, each in {"": evaluation, **{f"{name} ": each for name, each in evaluation.sets.items()}}.items():
        rows += [(f"{prefix}alone", each.alone)] if each.alone is not None else []
        rows += [(f"{prefix}system", each.system)] if prefix else []
        for kind in AtK.model_fields:
            values: dict[int, Estimate] = getattr(each.system_at, kind)
            rows += [(f"{prefix}{kind.removesuffix('_at')}@{max(values)}", values[max(values)])] if values else []
    return rows


def _cell(value: Estimate | None) -> str:
    if value is None or value.mean is None:
        return "not measured"
    return f"{value.mean:.3f} ({value.low:.3f}-{value.high:.3f}, n {value.n})"


def _change(before: Estimate | None, after: Estimate | None) -> str:
    if before is None or after is None or before.mean is None or after.mean is None:
        return ""
    return f"{after.mean - before.mean:+.3f}" + ("*" if of_other_inputs(before, after) else "")
