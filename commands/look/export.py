"""The viewer's pages as one HTML file: served by its server, or with embedded data as report.html and `marsrl compare` pages.

The file loads nothing and runs only its own scripts (their hashes are in the Content-Security-Policy). Models' texts are embedded
as data and displayed as text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from marsrl.commands.look.api import Api, listing
from marsrl.commands.look.catalog import Page, Row
from marsrl.trainer.runs.directory import RunDirectory, write_atomically
from marsrl.trainer.visible import shorten, shown

PAGES = Path(__file__).parent / "pages"
REPORT = ("overview", "samples", "problems", "curves", "pipeline", "warnings")
_LIBRARIES = ("preact.min.umd", "hooks.umd", "htm.umd", "uPlot.iife.min", "markdown-it.umd.min", "temml.min")
_SCRIPTS = tuple(f"vendor/{name}.js" for name in _LIBRARIES)
_MODULES = (  # in order: a module comes after those that it imports
    *("lib", "markdown", "tokens", "sample", "samples", "problems", "curves", "pipeline", "warnings", "overview"),
    *("compare", "app"),
)
_STYLES = ("vendor/uPlot.min.css", "style.css")
_PROBLEMS = 3  # number of problems of the first step, and of the last step, whose samples are embedded
_MOST_CHARS = 6000  # maximum characters of a text, so that 2 x 3 problems x 72 samples stay near 3 MB


def write_report(directory: str | Path) -> Path:
    """Write report.html of a run, finished or not, and return its path."""
    run = RunDirectory(Path(directory))
    api, answers = Api([run.path]), dict[str, Any]()
    catalog = api.catalogs[0]
    catalog.refresh(budget_s=None)

    def keep(question: str, **asked: Any) -> Any:
        answers[_key(question, asked)] = found = api.questions[question](**asked)
        return found

    keep("runs")
    for question in ("overview", "axes", "spans", "speed", "warnings"):
        keep(question, run=0)
    answers[_key("charts", {"run": 0})] = charts = [each for each in api.questions["charts"](run=0) if each["is_main"]]
    for chart in charts:
        keep("curves", run=0, name=_curves_of(chart))
    keep("problems", run=0, agent=next(iter(catalog.agents), ""))
    rows = list[Row]()
    for rollout in dict.fromkeys(name for last in (True, False) for name in catalog.deepest(last=last, num=_PROBLEMS)):
        keep("life", run=0, rollout=rollout)
        keep("tree", run=0, rollout=rollout)
        for row in catalog.tree(rollout):
            _cut(keep("sample", run=0, step=row.step, line=row.line))
            rows.append(row)
    rows.sort(key=lambda row: (row.step, row.block, row.line), reverse=True)
    answers[_key("samples", {"run": 0})] = shown(listing(Page(rows, len(rows), None, catalog.played(rows))))
    write_page(run.report, REPORT, answers)
    return run.report


def write_page(file: Path, pages: Sequence[str], answers: Mapping[str, Any]) -> None:
    """Write these pages of the viewer as one HTML file that opens on the first page. answers: embedded answers, by `_key`."""
    write_atomically(file, page({"pages": pages, "answers": answers})[0].encode("utf-8"))


def _curves_of(chart: Mapping[str, Any]) -> list[str]:
    """Return the names of a chart's metrics and intervals, in the order in which curves.js requests them."""
    bands = [f"{each['key']}/{end}" for each in chart["series"] if each["has_band"] for end in ("low", "high")]
    return [*(each["key"] for each in chart["series"]), *bands]


def _cut(sample: dict[str, Any]) -> None:
    """Shorten a sample's long texts in the middle, and drop their diff, which would contain the whole texts."""
    record = sample["record"]
    for name in ("prompt", "text"):
        if len(record[name]) > _MOST_CHARS:
            record[name], sample["diff"] = shorten(record[name], _MOST_CHARS), None


def _key(question: str, asked: Mapping[str, Any]) -> str:
    """Return the key of a question, the same as `key` of lib.js."""
    pairs = [(name, each) for name, value in asked.items() for each in (value if isinstance(value, list) else [value])]
    return "\n".join([question, *(f"{name}={each}" for name, each in pairs if each != "")])


def page(exported: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Return (HTML, Content-Security-Policy). exported: pages and embedded answers; None: the page queries its server."""
    data = json.dumps(exported, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    modules = "".join(map(_module, _MODULES))
    scripts = [(PAGES / name).read_text("utf-8") for name in _SCRIPTS] + [f"window.EXPORTED = {data};\n{modules}"]
    style = "\n".join((PAGES / name).read_text("utf-8") for name in _STYLES)
    policy = "; ".join(
        [
            f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; img-src data:",
            f"connect-src {'self' if exported is None else 'none'!r}; base-uri 'none'; form-action 'none'",
        ]
    )
    frame, tags = Template((PAGES / "page.html").read_text("utf-8")), (f"<script>{each}</script>" for each in scripts)
    return frame.substitute(policy=policy, style=style, scripts="\n".join(tags)), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"


_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+)|\{ (\w+) \})", re.M)


def _module(name: str) -> str:
    """Return a JavaScript module rewritten as part of one classic script, since a single file cannot import modules."""
    source = (PAGES / f"{name}.js").read_text("utf-8")
    exported = [first or second for first, second in _EXPORT.findall(source)]
    body = _IMPORT.sub(r"const \1 = \2_js;", source)
    body = _EXPORT.sub(lambda found: "// " if found[2] else "", body)
    assert not re.search(r"^(import|export)\b", body, re.M), f"{name}.js has an import or export of another form"
    return f"const {name}_js = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
