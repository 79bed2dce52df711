"""report.html of `marsrl curate`: what each stage kept and dropped, and why. Hostile text stays text, as in a run's report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from marsrl.trainer.curate.pipeline import StageRecord
from marsrl.trainer.report.report import page_environment
from marsrl.trainer.runs.directory import write_atomically


def write_report(out: Path, records: Sequence[StageRecord], config: str) -> Path:
    """The page of finished stages, and its path. config: the settings as text."""
    environment = page_environment(Path(__file__).parent)
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1, ensure_ascii=False)
    first = records[0].tally
    page = environment.get_template("curate.html.j2").render(
        name=out.resolve().name,
        records=records,
        num_rows=first.num_kept + first.num_dropped if first is not None else 0,
        config=config,
    )
    path = out / "report.html"
    write_atomically(path, page.encode("utf-8"))
    return path
