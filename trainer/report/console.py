"""Terminal output of a run: progress bars, messages and the final table. Nothing else draws on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from marsrl.rollout.types import Sample
from marsrl.trainer.report.cost import COLUMNS, MEANING, episode_costs
from marsrl.trainer.report.metrics import append_warning
from marsrl.trainer.report.summary import AtK, Estimate, Evaluation, Summary, compared, of_other_inputs
from marsrl.trainer.visible import visible

Say = Callable[[str], None]
MOST_SHOWN = 4000  # characters shown of each text of the first sample
PLAIN_INTERVAL_S = 15.0  # seconds between a bar's lines in a file: a 10-minute run prints fewer than 100 lines
PLAIN_SHARE = 0.05  # the same, as a share of the bar's age, if longer: an overnight run prints under 200 lines
CELL_INTERVAL_S = 0.5  # seconds between drawings of a bar in a notebook; a drawing replaces the last one


class _Pace(ProgressColumn):
    """Rate, time left and note of a bar, as far as known."""

    def render(self, task: Task) -> Text:
        return Text(_pace(task))


def _pace(task: Task) -> str:
    unit, speed = task.fields["unit"], task.fields["speed"]
    rate = time_left = ""
    if speed:
        per, seconds = ("s", 1) if speed >= 0.1 else ("min", 60) if speed >= 0.1 / 60 else ("h", 3600)
        rate = f"{speed * seconds:,.1f} {unit}/{per}" if unit else ""
        left_s = ((task.total or 0) - task.completed) / speed
        scale, suffix = (1, "s") if left_s < 100 else (60, "min") if left_s < 6000 else (3600, "h")
        time_left = f"{left_s / scale:.0f} {suffix} left" if left_s > 0 else ""
    return "  ".join(filter(None, [rate, time_left, task.fields["note"]]))


class Bar:
    """Progress bar: a count with its rate, the time left and a note (a loss). It shows nothing until it advances.

    say: prints a line now and then and at the end, or draws the bar in a notebook's cell, where rich's Progress draws nothing.
    The rate counts from the first update on: that update's count may come from an earlier process.
    """

    def __init__(
        self,
        progress: Progress,
        description: str,
        total: int | None,
        unit: str,
        say: Say | None,
        pause: tuple[float, float] = (PLAIN_INTERVAL_S, PLAIN_SHARE),
    ) -> None:
        """Create a bar that is not shown yet.

        pause: (seconds, share of the bar's age) between lines; the longer of the two times counts.
        """
        self._progress, self._say, self._began_s, self._pause = progress, say, time.monotonic(), pause
        self._said_s, self._first = self._began_s, (self._began_s, -1)  # A count of -1 means no update yet.
        self._id = progress.add_task(description, total=total, visible=False, unit=unit, note="", speed=0.0)

    def advance(self, count: int = 1, note: str | None = None) -> None:
        self.update(int(self._progress.tasks[0].completed) + count, note)

    def update(self, completed: int, note: str | None = None, total: int | None = None) -> None:
        """Set the progress, in units; note None keeps the last note."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        now_s = time.monotonic()
        if self._first[1] < 0:
            self._first = now_s, completed
        elapsed_s = now_s - self._first[0]
        speed = (completed - self._first[1]) / elapsed_s if elapsed_s else 0.0
        self._progress.update(self._id, completed=completed, total=total, visible=True, speed=speed, **fields)
        if now_s - self._said_s >= max(self._pause[0], self._pause[1] * (now_s - self._began_s)):
            self.say()

    def played(self, num_over: int, total: int, num_tokens: int, calls: str) -> None:
        """Show the progress of an evaluation (EvaluationPlay)."""
        tokens = f"{num_tokens:,} tokens"
        self.update(num_over, f"{calls}; {tokens}" if calls else tokens, total)

    def say(self) -> None:
        (task,) = self._progress.tasks
        if self._say is not None and task.visible:
            self._said_s = time.monotonic()
            of_total = f"/{task.total:,.0f}" if task.total is not None else ""
            count = f"{task.description}: {task.completed:,.0f}{of_total} {task.fields['unit']}".rstrip()
            self._say(f"{count}  {_pace(task)}".rstrip())


def _in_cell(progress: Progress) -> Say:
    """Return a function that draws the bar below the notebook's cell, replacing the last drawing."""
    from IPython.display import display

    handles = list[Any]()

    def draw(line: str) -> None:
        table = progress.make_tasks_table(progress.tasks)
        if handles:
            handles[0].update(table)
        else:
            handles.append(display(table, display_id=True))

    return draw


class RunConsole:
    """Console of one rank. Rank 0 draws; other ranks are silent.

    A bar is drawn on a terminal or in a notebook; elsewhere a line is printed now and then.

        console = RunConsole(rank=0)
        with console.progress("warm start", total=650, unit="steps") as bar:
            bar.advance(note="loss 0.31")
        console.results(summary)

    Text is printed by `literal`, so that neither `[red]` nor an escape sequence in a model's text or a path has an effect.
    """

    def __init__(self, rank: int = 0, stream: TextIO | None = None) -> None:
        self.is_quiet = rank != 0
        self._console = Console(file=stream or sys.stderr, quiet=self.is_quiet, highlight=False)
        self._kept: Path | None = None
        self.step = 0  # the run's current step, recorded with warnings

    def message(self, text: str) -> None:
        self._console.print(literal(text), soft_wrap=True)

    @contextmanager
    def part(self, text: str) -> Iterator[None]:
        """Print a line when a part of the start-up begins, and its duration when it ends."""
        self.message(f"{text} ...")
        began = time.monotonic()
        yield
        self.message(f"{text}: {time.monotonic() - began:.1f} s")

    def sample(self, sample: Sample) -> None:
        """Print a whole sample: the prompt, the completion, the parsed answer or verdict, and the reward."""
        finding = "neither an answer nor a verdict"
        if sample.answer is not None:
            finding = f"the answer {sample.answer!r}"
        elif sample.verdict is not None:
            finding = f"the verdict {'correct' if sample.verdict else 'wrong'}"
        reward = "no reward" if sample.reward.is_missing else f"reward {sample.reward.value:g}"
        note = f" ({sample.reward.note})" if sample.reward.note else ""
        self.message(
            f"first sample, {sample.uid}\n"
            f"--- {sample.agent} read {len(sample.prompt_ids):,} tokens:\n{_cut(sample.prompt_text)}\n"
            f"--- it wrote {len(sample.token_ids):,} tokens ({sample.finish}):\n{_cut(sample.text)}\n"
            f"--- parsed: {finding}; {reward}{note}"
        )

    def keep_warnings(self, path: Path) -> None:
        """Append each later warning, with its step, to this file too."""
        self._kept = path

    def warning(self, text: str) -> None:
        if self._kept is not None and not self.is_quiet:
            append_warning(self._kept, self.step, text)
        self._console.print(literal(f"warning: {text}", "yellow"), soft_wrap=True)

    @contextmanager
    def progress(self, description: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        """Yield a bar for the body. total None: unknown, so only count and rate are shown."""
        is_drawn = self._console.is_terminal and not self.is_quiet
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(20), MofNCompleteColumn(), _Pace(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=not is_drawn) as progress:
            if self._console.is_jupyter and not self.is_quiet:
                bar = Bar(progress, description, total, unit, _in_cell(progress), (CELL_INTERVAL_S, 0.0))
            else:
                bar = Bar(progress, description, total, unit, None if is_drawn else self.message)
            yield bar
            bar.say()

    def accuracies(self, name: str, evaluation: Evaluation) -> None:
        """Print an evaluation's accuracies in one line, with 95% intervals. name: the evaluation's name."""
        self.message(f"{name}: {'; '.join(f'{row} {_cell(estimate)}' for row, estimate in evaluation.rows.items())}")

    def results(self, summary: Summary) -> None:
        """Print the before / after table with 95% intervals; nothing without an evaluation."""
        if summary.before is None and summary.after is None:
            return
        title = f"{summary.name}: held-out problems, 95% intervals over problems"
        table = table_of(title, "", "before", "after", "change")
        rows = compared(summary.before, summary.after)
        if any(of_other_inputs(before, after) for _, before, after in rows):
            table.caption = Text("* before and after have different inputs (n), so the change also depends on these")
            table.caption_justify = "left"
        for name, before, after in rows:
            table.add_row(name, _cell(before), _cell(after), _change(before, after))
        self._console.print(table)

    def team(self, name: str, evaluation: Evaluation, seconds: float) -> None:
        """Print a team's accuracy, the cost of an episode by agent, and the notes.

        seconds: the evaluation's duration.
        """
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, 160)
        columns = COLUMNS if self._console.width >= 100 else COLUMNS[:3]  # evaluation.json has all columns.
        title = f"{MEANING}; the whole evaluation took {seconds:.1f} s"
        table = table_of(title, "", "correct", *(column.replace(" ", "\n") for column in columns))
        table.box, table.show_edge, table.collapse_padding = SIMPLE_HEAD, False, True
        team_row, parts = episode_costs(evaluation)
        table.add_row(Text(name), _cell(team_row.correct), *team_row.cells[: len(columns)])
        for row, estimate in _rows_at(evaluation):
            table.add_row(Text(f"  {row}"), _cell(estimate))
        for part in parts:
            correct = "" if part.correct is None else _cell(part.correct)
            table.add_row(Text(f"  {part.name}"), correct, *part.cells[: len(columns)])
        self._console.print(table)
        for note in evaluation.notes:
            self.warning(note)


def _cut(text: str) -> str:
    """Return the text, without its middle if it is long."""
    left_out = len(text) - MOST_SHOWN
    return text if left_out <= 0 else f"{text[: MOST_SHOWN // 2]} [{left_out:,} characters] {text[-MOST_SHOWN // 2 :]}"


def literal(text: str, style: str = "") -> Text:
    """Return the text for a terminal, without markup and with control characters as symbols."""
    return Text(visible(text), style=style)


def table_of(title: str, *headings: str) -> Table:
    """Create a table whose first column names the rows of numbers in the other columns."""
    table = Table(title=Text(title), title_justify="left", pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if i else "left", no_wrap=bool(i))
    return table


def _rows_at(evaluation: Evaluation) -> list[tuple[str, Estimate]]:
    """Return (name, estimate) rows of the first agent alone, pass@k and majority@k, and each set's system.

    k is the largest number of draws.
    """
    rows = []
    for prefix, evaluated in {
        "": evaluation,
        **{f"{name} ": evaluated for name, evaluated in evaluation.sets.items()},
    }.items():
        rows += [
            (f"{prefix}{name}", row)
            for name, row in evaluated.rows.items()
            if name == "alone" or (prefix and name == "system")
        ]
        for kind in AtK.model_fields:
            values: dict[int, Estimate] = getattr(evaluated.system_at, kind)
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
