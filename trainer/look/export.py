"""report.html and the page of `marsrl compare`: the viewer's own pages in one file, with the answers to what they will ask.

The file loads nothing and runs its own scripts alone (Content-Security-Policy with their hashes): what models wrote is data in
it, and becomes text nodes as in the viewer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marsrl.trainer.look.answers import Answers
from marsrl.trainer.look.visible import shorten
from marsrl.trainer.runs.directory import RunDirectory, write_atomically

PAGES = Path(__file__).parent / "pages"
REPORT = ("overview", "samples", "curves", "pipeline", "warnings")
_SCRIPTS = ("vendor/preact.min.umd.js", "vendor/hooks.umd.js", "vendor/htm.umd.js", "vendor/uPlot.iife.min.js")
_MODULES = ("lib", "tokens", "sample", "samples", "curves", "pipeline", "warnings", "overview", "compare", "app")
_STYLES = ("vendor/uPlot.min.css", "style.css")
_PROBLEMS = 3  # of the first step, and of the last: whose samples are in the file
_MOST_CHARS = 6000  # of a text: 2 x 3 problems x 72 samples then stay near 3 MB


def write_report(directory: str | Path) -> Path:
    """Write report.html of a run, finished or not, and return its path.

    Raises:
        ValueError: the directory is not there.
    """
    run = RunDirectory(Path(directory))
    if not run.path.is_dir():
        raise ValueError(f"report: {run.path} is not there; give the directory of a run (it holds config.yaml)")
    export([run.path], run.report, REPORT)
    return run.report


def export(paths: Sequence[Path], file: Path, pages: Sequence[str]) -> None:
    """Write these pages of the viewer for these runs, the first of them to begin with, as one HTML file."""
    answers = Answers(paths)
    kept: dict[str, Any] = {}

    def keep(question: str, **asked: Any) -> Any:
        kept[_key(question, asked)] = found = answers.questions[question](**asked)
        return found

    if "compare" in pages:
        keep("compare")
    else:
        for catalog in answers.catalogs:
            catalog.refresh(budget_s=None)
    keep("runs")
    for run in range(len(paths)) if "overview" in pages else ():
        for question in ("overview", "spans", "speed", "warnings"):
            keep(question, run=run)
        charts = [chart for chart in answers.charts(run) if chart["is_main"]]
        kept[_key("charts", {"run": run})] = charts
        for chart in charts:
            keep("curves", run=run, name=_curves_of(chart))
        _keep_samples(answers, run, kept)
    content = {"pages": pages, "answers": kept}
    write_atomically(file, _page(content).encode("utf-8"))


def _curves_of(chart: Mapping[str, Any]) -> list[str]:
    """The metrics of a chart, and the intervals of those that have one, as curves.js asks for them."""
    bands = [f"{each['key']}/{end}" for each in chart["series"] if each["has_band"] for end in ("low", "high")]
    return [*(each["key"] for each in chart["series"]), *bands]


def _keep_samples(answers: Answers, run: int, kept: dict[str, Any]) -> None:
    """The deepest problems of the first and of the last step, their texts cut in the middle."""
    catalog = answers.catalogs[run]
    chosen = dict.fromkeys(name for last in (True, False) for name in catalog.deepest(last=last, num=_PROBLEMS))
    rows = []
    for rollout in chosen:
        kept[_key("life", {"run": run, "rollout": rollout})] = answers.life(run, rollout)
        for row in catalog.tree(rollout):
            place = {"run": run, "step": row.step, "line": row.line}
            found = answers.sample(**place)
            record = found["record"]
            texts = {name: shorten(record[name], _MOST_CHARS) for name in ("prompt", "text")}
            is_long = max(len(record["prompt"]), len(record["text"])) > _MOST_CHARS
            kept[_key("sample", place)] = found | {
                "record": record | texts,
                "diff": None if is_long else found["diff"],
            }
            rows.append(found["row"])
    rows.sort(key=lambda row: (row["step"], row["line"]), reverse=True)
    kept[_key("samples", {"run": run})] = {"rows": rows, "num": len(rows), "next": None}


def _key(question: str, asked: Mapping[str, Any]) -> str:
    """As `key` of lib.js."""
    pairs = [
        f"{name}={each}" for name, value in asked.items() for each in (value if isinstance(value, list) else [value])
    ]
    return "\n".join([question, *pairs])


def _page(content: Mapping[str, Any]) -> str:
    data = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    modules = "".join(map(_module, _MODULES))
    scripts = [(PAGES / name).read_text("utf-8") for name in _SCRIPTS] + [f"window.EXPORTED = {data};\n{modules}"]
    hashes = [base64.b64encode(hashlib.sha256(each.encode("utf-8")).digest()).decode() for each in scripts]
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; script-src "
    )
    policy += " ".join(f"'sha256-{each}'" for each in hashes)
    style = "\n".join((PAGES / name).read_text("utf-8") for name in _STYLES)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n<title>marsrl</title>',
            f"<style>\n{style}\n</style>\n</head>",
            '<body><p id="wait">This page needs JavaScript: its charts and samples are drawn by the scripts in it.</p>',
            *(f"<script>{each}</script>" for each in scripts),
            "</body>\n</html>\n",
        ]
    )


_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+)|\{ (\w+) \})", re.M)


def _module(name: str) -> str:
    """A module of the pages as a part of one classic script: file: URLs cannot import."""
    source = (PAGES / f"{name}.js").read_text("utf-8")
    exported = [first or second for first, second in _EXPORT.findall(source)]
    body = _IMPORT.sub(r"const \1 = \2_js;", source)
    body = _EXPORT.sub(lambda found: "// " if found[2] else "", body)
    assert not re.search(r"^(import|export)\b", body, re.M), f"{name}.js has an import or export of another form"
    return f"const {name}_js = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
